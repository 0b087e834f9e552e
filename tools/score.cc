// lmhead score: log-prob and entropy of every token of a batch under a model's head.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include "batch_file.h"
#include "checks.h"
#include "commands.h"
#include "device.h"
#include "head_file.h"
#include "lmhead/lmhead.h"
#include "machine.h"
#include "output_file.h"
#include "report.h"
#include "scores.h"

namespace lmhead::tools {
namespace {

struct Options {
  std::string batch, model, backend = "auto", out, html, tokens, json;
  std::optional<std::string> tensor;
  std::optional<double> softcap, logit_scale;
  std::optional<std::int64_t> valid_vocab;
  double temperature = 1.0;
  bool entropy = false;
  int threads = 0;
};

/// A line on stderr that rewrites itself; silent when stderr is not a terminal.
class Progress {
 public:
  explicit Progress(std::int64_t total) : total_(total), shown_(total > 0 && ::isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }
  void update(std::int64_t done) const {
    if (shown_) fmt::print(stderr, "\rscoring {:3d} %  {}/{} rows", 100 * done / total_, done, total_);
    std::fflush(stderr);
  }

 private:
  std::int64_t total_;
  bool shown_;
};

void note(const std::string& message) { fmt::print(stderr, "lmhead: note: {}\n", message); }

ConstVector slice(const std::vector<std::int64_t>& values, std::int64_t begin, std::int64_t end) {
  return {values.data() + begin, end - begin, 1, DType::kInt64};
}

Problem make_problem(const Options& options, const Head& head) {
  Problem problem;
  problem.weight = head.weight;
  problem.bias = head.bias;
  problem.temperature = options.temperature;
  problem.softcap = options.softcap ? options.softcap : head.softcap;
  if (problem.softcap == 0.0) problem.softcap.reset();  // --softcap 0 overrides the model's with none
  problem.logit_scale = options.logit_scale.value_or(head.logit_scale);
  problem.valid_vocab = options.valid_vocab;
  problem.ignore_index = kIgnoreIndex;
  problem.entropy = options.entropy ? EntropyMode::kMetric : EntropyMode::kOff;
  problem.inference_only = true;
  return problem;
}

/// Scores chunks of rows, for the progress line; results do not depend on the cut.
void run(const Options& options, const Batch& batch, Problem problem, Scores& scores) {
  const std::int64_t n = batch.rows();
  const BackendChoice choice = choose_backend(options.backend);
  Uploads head(choice.device);
  problem.weight = head.matrix(problem.weight);
  problem.bias = head.vector(problem.bias);
  DeviceBuffer workspace, logprob, entropy;
  Execution execution;
  execution.backend = choice.backend.c_str();
  execution.device = choice.device;
  execution.threads = options.threads;
  scores.threads = options.threads > 0 ? options.threads : usable_cpus();
  scores.logprob.assign(static_cast<std::size_t>(n), 0.0f);
  if (options.entropy) scores.entropy.assign(static_cast<std::size_t>(n), 0.0f);

  // At first few rows, so that a slow backend shows life soon; then as many as take about a second.
  constexpr double kChunkSeconds = 1.0;
  std::int64_t chunk = 64 * static_cast<std::int64_t>(scores.threads);
  const std::int64_t element = static_cast<std::int64_t>(size_of(batch.hidden.dtype));
  const auto* hidden = static_cast<const std::byte*>(batch.hidden.data);
  const Progress progress(n);
  for (std::int64_t begin = 0, end = 0; begin < n || n == 0; begin = end) {
    end = std::min(n, begin + chunk);
    problem.hidden = batch.hidden;
    problem.hidden.rows = end - begin;
    problem.hidden.data = hidden + begin * batch.hidden.row_stride * element;
    Uploads rows(choice.device);
    problem.hidden = rows.matrix(problem.hidden);
    problem.targets = rows.vector(slice(batch.targets, begin, end));
    const auto bytes = static_cast<std::size_t>(end - begin) * sizeof(float);
    logprob.reserve(choice.device, bytes);
    ForwardOutputs outputs;
    outputs.logprob = {logprob.data(), end - begin, 1, DType::kFloat32};
    if (options.entropy) {
      entropy.reserve(choice.device, bytes);
      outputs.entropy = {entropy.data(), end - begin, 1, DType::kFloat32};
    }
    if (choice.device == Device::kCuda) {  // on the CPU the call allocates what it needs
      const Result<WorkspaceSize> needed = workspace_size(problem, Operation::kForward, {}, execution);
      require_ok(needed.status());
      workspace.reserve(choice.device, needed->bytes);
      execution.workspace = workspace.data();
      execution.workspace_bytes = workspace.size();
    }

    const auto start = std::chrono::steady_clock::now();
    require_ok(forward(problem, outputs, execution));
    synchronize(choice.device);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    logprob.download(scores.logprob.data() + begin, bytes);
    if (options.entropy) entropy.download(scores.entropy.data() + begin, bytes);
    scores.seconds += seconds;
    scores.backend = last_backend();
    if (n == 0) return;
    progress.update(end);
    if (seconds < kChunkSeconds / 2) chunk *= 2;
  }
}

/// Finite inputs can still overflow fp32 logits; such a result must not pass for a score.
void check_results(const Batch& batch, const Scores& scores) {
  for (std::int64_t i = 0; i < batch.rows(); ++i)
    if (std::isnan(scores.logprob[i]) || (!scores.entropy.empty() && !std::isfinite(scores.entropy[i])))
      throw failed(fmt::format("{}: row {}: its logits overflow fp32", batch.file.path(), i));
}

void check_paths(const Options& options) {
  for (const std::string* output : {&options.out, &options.html}) {
    require_other_file(*output, options.batch, "the batch");
    require_other_file(*output, options.model, "the model");
    require_other_file(*output, options.tokens, "--tokens");
  }
  if (!options.out.empty() && same_path(options.out, options.html))
    throw bad_input("--html: expected a file other than that of --out, got " + options.html);
  if (!options.tokens.empty() && options.html.empty()) throw bad_input("--tokens: expected together with --html");
}

void score(Options options) {
  check_paths(options);
  if (!options.html.empty()) options.entropy = true;  // the report shows both
  const Batch batch = read_batch(options.batch);
  const Head head = open_head(options.model, options.tensor);
  for (const std::string* output : {&options.out, &options.html}) require_other_file(*output, head.path, "the model");
  if (head.weight.cols != batch.hidden.cols)
    throw bad_input(fmt::format("{}: hidden: expected [N, {}] to match {} [{}, {}], got [{}, {}]", options.batch,
                                head.weight.cols, head.name, head.weight.rows, head.weight.cols, batch.rows(),
                                batch.hidden.cols));
  if (options.valid_vocab && (*options.valid_vocab < 1 || *options.valid_vocab > head.weight.rows))
    throw bad_input(fmt::format("--valid-vocab: expected in [1, {}], got {}", head.weight.rows, *options.valid_vocab));
  check_targets(batch, options.valid_vocab.value_or(head.weight.rows));
  const std::vector<std::string> tokens =
      options.tokens.empty() ? std::vector<std::string>() : read_tokens(options.tokens, batch.rows());
  check_finite(options.batch + ": hidden", batch.hidden);
  ConstMatrix vocabulary = head.weight;
  if (options.valid_vocab) vocabulary.rows = *options.valid_vocab;  // padding may hold any bits
  check_finite(head.path + ": " + head.name, vocabulary);
  if (!batch.unused.empty()) note(fmt::format("{}: not read: {}", options.batch, fmt::join(batch.unused, ", ")));

  remove_on_interrupt();
  std::optional<OutputFile> out, html;
  if (!options.out.empty()) out.emplace(options.out);
  if (!options.html.empty()) html.emplace(options.html);

  Scores scores;
  const Problem problem = make_problem(options, head);
  run(options, batch, problem, scores);
  check_results(batch, scores);
  summarise(batch, scores);
  scores.batch = options.batch;
  scores.model = options.model;
  scores.tensor = head.name;
  scores.weight_dtype = to_string(head.weight.dtype);
  scores.hidden_dtype = to_string(batch.hidden.dtype);
  scores.vocab = head.weight.rows;
  scores.width = head.weight.cols;
  scores.temperature = problem.temperature;
  scores.logit_scale = problem.logit_scale;
  scores.softcap = problem.softcap;
  scores.version = version();

  if (out) {
    std::vector<OutputVector> vectors = {{"logprob", &scores.logprob}};
    if (options.entropy) vectors.push_back({"entropy", &scores.entropy});
    out->write(safetensors_header(vectors, {{"lmhead_version", scores.version},
                                            {"backend", scores.backend},
                                            {"tensor", scores.tensor},
                                            {"temperature", fmt::format("{}", scores.temperature)}}));
    for (const OutputVector& vector : vectors) out->write(vector.values->data(), vector.values->size() * sizeof(float));
  }
  if (html) html->write(render_report(batch, scores, tokens));
  if (out) out->commit();
  if (html) html->commit();
  fmt::print("{}", options.json.empty() ? to_table(scores) : to_json_lines(batch, scores, options.json == "tokens"));
}

}  // namespace

void add_score(CLI::App& app) {
  CLI::App* command = app.add_subcommand("score", "Log-prob and entropy of every token of a batch");
  auto options = std::make_shared<Options>();
  command->add_option("BATCH", options->batch, "batch.safetensors: hidden, targets or input_ids, cu_seqlens, loss_mask")
      ->required();
  command->add_option("--model", options->model, "Hugging Face folder, its index, or one .safetensors file")
      ->required();
  command->add_option("--tensor", options->tensor, "Weight [V, H]; default: lm_head.weight, else the tied embedding");
  command->add_option("--temperature", options->temperature, "Divides finished logits (1)")
      ->check(finite_number("a finite number > 0", [](double value) { return value > 0; }));
  command->add_option("--softcap", options->softcap, "Logit soft cap, 0 for none (config.json's, else none)")
      ->check(finite_number("a finite number > 0, or 0 for none", [](double value) { return value >= 0; }));
  command->add_option("--logit-scale", options->logit_scale, "Multiplies logits (config.json's, else 1)")
      ->check(finite_number("a finite number", [](double) { return true; }));
  command->add_option("--valid-vocab", options->valid_vocab, "Rows of the weight beyond it are padding");
  command->add_flag("--entropy", options->entropy, "Compute entropy too");
  command->add_option("--backend", options->backend, "auto, cuda, or a name that `lmhead info` lists (auto)");
  command->add_option("--threads", options->threads, "CPU threads, 0 for all (0)")->check(non_negative_int());
  command->add_option("--out", options->out, "Write logprob (and entropy) [N] F32 to this .safetensors file")
      ->check(not_empty());
  command->add_flag("--json{sequences}", options->json, "JSON lines on stdout; --json=tokens adds a line a token")
      ->check(CLI::IsMember({"sequences", "tokens"}));
  command->add_option("--html", options->html, "Write a report with coloured tokens (implies --entropy)")
      ->check(not_empty());
  command->add_option("--tokens", options->tokens, "tokens.json, the N token strings, for the report")
      ->check(not_empty());
  command->callback([options] { score(*options); });
}

}  // namespace lmhead::tools
