#include "output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "commands.h"

namespace lmhead::tools {
namespace {

// Names that the signal handler unlinks. It may only touch lock-free atomics and call
// async-signal-safe functions, hence plain C strings in a fixed table.
constexpr int kSlots = 8;
std::atomic<const char*> temporaries[kSlots];
static_assert(std::atomic<const char*>::is_always_lock_free);

int reserve(const char* name) {
  for (int slot = 0; slot < kSlots; ++slot) {
    const char* empty = nullptr;
    if (temporaries[slot].compare_exchange_strong(empty, name)) return slot;
  }
  throw failed("too many output files");
}

void remove_and_exit(int signal) {
  for (const auto& temporary : temporaries)
    if (const char* name = temporary.load()) ::unlink(name);
  if (::isatty(STDERR_FILENO)) {
    constexpr char kNewline = '\n';
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, &kNewline, 1);
  }
  ::_exit(128 + signal);
}

}  // namespace

OutputFile::OutputFile(const std::string& path)
    : path_(path), temporary_(fmt::format("{}.{}.tmp", path, static_cast<long>(::getpid()))) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw bad_input(path + ": expected a regular file or none to write to");
  slot_ = reserve(temporary_.c_str());  // before the file exists, so that a signal never misses it
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    const int error = errno;
    temporaries[slot_] = nullptr;
    throw bad_input(fmt::format("{}: cannot write: {}", path, std::strerror(error)));
  }
}

OutputFile::~OutputFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
  temporaries[slot_] = nullptr;
}

void OutputFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw failed(fmt::format("{}: cannot write: {}", path_, std::strerror(errno)));
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void OutputFile::commit() {
  if (::close(std::exchange(fd_, -1)) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    temporaries[slot_] = nullptr;
    throw failed(fmt::format("{}: cannot write: {}", path_, std::strerror(error)));
  }
  temporaries[slot_] = nullptr;
}

bool same_path(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path whole_a = fs::weakly_canonical(fs::absolute(a, error), error);
  const fs::path whole_b = fs::weakly_canonical(fs::absolute(b, error), error);
  return !whole_a.empty() && whole_a == whole_b;
}

void require_other_file(const std::string& output, const std::string& input, const std::string& what) {
  std::error_code error;
  if (!output.empty() && !input.empty() && std::filesystem::equivalent(output, input, error))
    throw bad_input(output + ": expected an output file other than " + what);
}

void remove_on_interrupt() {
  struct sigaction action {};
  action.sa_handler = remove_and_exit;
  ::sigfillset(&action.sa_mask);
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction before {};
    // A shell's background job ignores SIGINT, nohup's SIGHUP, and shall go on doing so.
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace lmhead::tools
