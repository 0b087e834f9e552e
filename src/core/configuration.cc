#include "core/configuration.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "core/implementation.h"

namespace lmhead {
namespace {

/// The choices that this process knows, a table a source. Files are read once each; a call then takes a
/// shared lock and one look-up.
class Registry {
 public:
  /// Name of the chosen configuration, or "" for the default.
  std::string find(const TuningSource& source, const TuningKey& key) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto table = tables_.find(&source); table != tables_.end()) return name_in(table->second, key);
    }
    const std::unique_lock lock(mutex_);
    return name_in(table_of(source), key);
  }

  void adopt(const TuningSource& source, const TuningTable& choices) {
    const std::unique_lock lock(mutex_);
    TuningTable& table = table_of(source);
    for (const auto& [key, configuration] : choices) table[key] = configuration;
  }

 private:
  static std::string name_in(const TuningTable& table, const TuningKey& key) {
    const auto found = table.find(key);
    return found == table.end() ? std::string() : found->second;
  }
  TuningTable& table_of(const TuningSource& source) {
    const auto [at, missing] = tables_.try_emplace(&source);
    if (missing) {
      std::string warning;
      at->second = read_tuning(tuning_file(source), source, &warning);
      if (!warning.empty()) std::fprintf(stderr, "lmhead: warning: %s\n", warning.c_str());
    }
    return at->second;
  }

  std::shared_mutex mutex_;
  std::map<const TuningSource*, TuningTable> tables_;  // sources live as long as the process
};

Registry& registry() {
  static Registry* const kRegistry = new Registry;  // not destroyed: calls may outlive static objects
  return *kRegistry;
}

std::span<const Configuration> configurations_of(const Implementation& i, Operation operation) {
  return i.configurations == nullptr ? std::span<const Configuration>() : i.configurations(operation);
}

const Configuration* find(std::span<const Configuration> list, const std::string& name) {
  const auto found = std::find_if(list.begin(), list.end(), [&](const Configuration& c) { return c.name == name; });
  return found == list.end() ? nullptr : &*found;
}

}  // namespace

std::vector<std::string> configurations(const std::string& backend, Operation operation) {
  std::vector<std::string> names;
  for (const Implementation* i : implementations()) {
    if (backend != i->name) continue;
    for (const Configuration& c : configurations_of(*i, operation)) names.emplace_back(c.name);
    if (names.empty()) names.emplace_back(kDefaultConfiguration);
  }
  return names;
}

TuningKey tuning_key(const ResolvedProblem& r, Operation operation) {
  const Problem& p = r.given;
  const bool backward = operation == Operation::kBackward;
  return {.operation = backward ? Operation::kBackward : Operation::kForward,
          .bucket = token_bucket(r.n),
          .h = r.h,
          .v = r.v_local,
          .dtype = r.compute,
          .entropy = backward ? p.entropy == EntropyMode::kGrad : p.entropy != EntropyMode::kOff,
          .general = !p.bias.absent() || p.softcap.has_value() || !(p.logit_scale > 0)};
}

Result<const Configuration*> choose_configuration(const Implementation& implementation, const ResolvedProblem& problem,
                                                  Operation operation, const Execution& execution) {
  const std::span<const Configuration> list = configurations_of(implementation, operation);
  const std::string wanted = execution.configuration != nullptr ? execution.configuration : "auto";
  const Configuration* const by_default = list.empty() ? nullptr : &list.front();
  if (wanted == kDefaultConfiguration) return by_default;
  if (wanted != "auto") {
    if (const Configuration* named = find(list, wanted)) return named;
    std::string names;
    for (const std::string& name : configurations(implementation.name, operation)) names += ", " + name;
    return Status(StatusCode::kInvalidArgument,
                  "configuration: expected auto" + names + " of backend " + implementation.name + ", got " + wanted);
  }
  if (list.size() < 2) return by_default;
  Result<const TuningSource*> source = implementation.tuning_source();
  if (!source.ok()) return by_default;
  const Configuration* tuned = find(list, registry().find(**source, tuning_key(problem, operation)));
  return tuned != nullptr ? tuned : by_default;
}

void adopt_tuning(const TuningSource& source, const TuningTable& table) { registry().adopt(source, table); }

}  // namespace lmhead
