#include "core/tuning_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace lmhead {
namespace {

constexpr const char* kFormat = "lmhead tuning 1";
/// A cache holds a line for each shape ever tuned; a file beyond this is not one of ours.
constexpr std::uintmax_t kMostBytes = std::uintmax_t{1} << 20;

std::vector<std::pair<const char*, const std::string*>> header(const TuningSource& s) {
  return {{"version", &s.version},
          {"backend", &s.backend},
          {"device", &s.device},
          {"driver", &s.driver},
          {"library", &s.library}};
}

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  return text;
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

std::string to_line(const TuningKey& key, const std::string& configuration) {
  std::ostringstream line;
  line << (key.operation == Operation::kBackward ? "backward" : "forward") << ' ' << key.bucket << ' ' << key.h << ' '
       << key.v << ' ' << to_string(key.dtype) << ' ' << (key.entropy ? "entropy" : "-") << ' '
       << (key.general ? "general" : "-") << ' ' << configuration;
  return line.str();
}

bool parse_line(const std::string& line, TuningKey* key, std::string* configuration) {
  std::istringstream words(line);
  std::string operation, dtype, entropy, general, more;
  if (!(words >> operation >> key->bucket >> key->h >> key->v >> dtype >> entropy >> general >> *configuration))
    return false;
  if (words >> more) return false;
  if (operation != "forward" && operation != "backward") return false;
  key->operation = operation == "backward" ? Operation::kBackward : Operation::kForward;
  key->entropy = entropy == "entropy";
  key->general = general == "general";
  for (const DType type : kTypes)
    if (dtype == to_string(type)) {
      key->dtype = type;
      // What is read must be what would be written: no sloppy number, no unknown word.
      return key->bucket == token_bucket(key->bucket) && key->h > 0 && key->v > 0 &&
             to_line(*key, *configuration) == line;
    }
  return false;
}

std::string file_text(const TuningSource& source, const TuningTable& table) {
  std::string text = std::string(kFormat) + "\n";
  for (const auto& [name, value] : header(source)) text += std::string(name) + " " + one_line(*value) + "\n";
  for (const auto& [key, configuration] : table) text += to_line(key, configuration) + "\n";
  // The last line tells a whole file from one that was cut off.
  return text + "end " + std::to_string(table.size()) + "\n";
}

Status system_error(const char* step, const std::filesystem::path& path) {
  return {StatusCode::kInternal,
          "tuning cache: cannot " + std::string(step) + " " + path.string() + ": " + std::strerror(errno)};
}

/// Holds off other writers while it lives. Best effort: where a lock is refused, the rename alone keeps files
/// whole, and of two writers at once the later one's choices remain.
class WriterLock {
 public:
  explicit WriterLock(const std::filesystem::path& path)
      : descriptor_(::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    for (int wait = 0; descriptor_ >= 0 && wait < 200 && ::flock(descriptor_, LOCK_EX | LOCK_NB) != 0; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ~WriterLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

 private:
  int descriptor_;
};

Status write_whole(int descriptor, const std::string& text, const std::filesystem::path& path) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(descriptor, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return system_error("write", path);
    done += static_cast<std::size_t>(wrote);
  }
  return ::fsync(descriptor) == 0 ? Status() : system_error("write", path);
}

}  // namespace

std::int64_t token_bucket(std::int64_t tokens) {
  constexpr std::uint64_t kLeast = 128, kMost = std::uint64_t{1} << 20;
  if (tokens <= static_cast<std::int64_t>(kLeast)) return kLeast;
  if (tokens >= static_cast<std::int64_t>(kMost)) return kMost;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens)));
}

std::filesystem::path tuning_file(const TuningSource& source) {
  // The XDG specification has relative paths ignored.
  const auto folder = [](const char* variable) {
    const char* value = std::getenv(variable);
    return value != nullptr && value[0] == '/' ? std::filesystem::path(value) : std::filesystem::path();
  };
  std::filesystem::path cache = folder("XDG_CACHE_HOME");
  if (cache.empty() && !folder("HOME").empty()) cache = folder("HOME") / ".cache";
  if (cache.empty()) return {};
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const auto& [name, value] : header(source))
    for (const char c : std::string(name) + "=" + *value + "\n")
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return cache / "lmhead" / (source.backend + "-" + digits + ".tuning");
}

TuningTable read_tuning(const std::filesystem::path& file, const TuningSource& source, std::string* warning) {
  const auto ignored = [&](const std::string& why) {
    *warning = "tuning cache: " + file.string() + " is ignored: " + why;
    return TuningTable{};
  };
  warning->clear();
  std::error_code error;
  if (file.empty() || !std::filesystem::exists(file, error)) return {};
  if (!std::filesystem::is_regular_file(file, error)) return ignored("expected a regular file");
  if (std::filesystem::file_size(file, error) > kMostBytes || error) return ignored("expected at most 1 MiB");
  std::ifstream in(file);
  std::string line;
  if (!in || !std::getline(in, line)) return ignored("it cannot be read");
  if (line != kFormat) return ignored(std::string("expected the first line \"") + kFormat + "\"");
  for (const auto& [name, value] : header(source)) {
    const std::string expected = std::string(name) + " " + one_line(*value);
    if (!std::getline(in, line) || line != expected)
      return ignored("expected \"" + expected + "\", got \"" + line.substr(0, 200) + "\"");
  }
  TuningTable table;
  for (int number = 7; std::getline(in, line); ++number) {
    if (line == "end " + std::to_string(table.size())) return table;
    TuningKey key{};
    std::string configuration;
    if (!parse_line(line, &key, &configuration)) return ignored("line " + std::to_string(number) + " is broken");
    table[key] = configuration;
  }
  return ignored("its end is missing");
}

Status write_tuning(const std::filesystem::path& file, const TuningSource& source, const TuningTable& table) {
  if (file.empty())
    return {StatusCode::kInvalidArgument,
            "tuning cache: expected an absolute path in XDG_CACHE_HOME or HOME, got none"};
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  if (error)
    return {StatusCode::kInternal,
            "tuning cache: cannot create " + file.parent_path().string() + ": " + error.message()};
  const WriterLock lock(file.string() + ".lock");
  std::string warning;  // what is broken is replaced
  TuningTable merged = read_tuning(file, source, &warning);
  for (const auto& [key, configuration] : table) merged[key] = configuration;

  std::string name = file.string() + ".XXXXXX";
  const int descriptor = ::mkstemp(name.data());
  if (descriptor < 0) return system_error("create", name);
  Status status = write_whole(descriptor, file_text(source, merged), name);
  if (::close(descriptor) != 0 && status.ok()) status = system_error("write", name);
  if (status.ok() && ::rename(name.c_str(), file.c_str()) != 0) status = system_error("replace", file);
  if (!status.ok()) ::unlink(name.c_str());
  return status;
}

}  // namespace lmhead
