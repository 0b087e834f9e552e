// Output files that are either whole or absent, also after an error or Ctrl-C.
#pragma once

#include <string>
#include <string_view>

namespace lmhead::tools {

/// A file written beside its destination and renamed onto it by commit(). Without a commit it is
/// removed: by the destructor, or by the signal handler of remove_on_interrupt().
class OutputFile {
 public:
  /// Creates the temporary file, so that an unwritable destination is found before the work starts.
  /// Throws bad input if `path` names something other than a regular file, or cannot be created.
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Throws CommandError (failed) when the device refuses.
  void write(std::string_view bytes);
  void write(const void* data, std::size_t bytes) { write({static_cast<const char*>(data), bytes}); }
  void commit();

 private:
  std::string path_, temporary_;
  int fd_ = -1;
  int slot_ = -1;
};

/// Whether both name one file, or would: of those that do not exist yet the spellings are compared.
bool same_path(const std::string& a, const std::string& b);
/// Throws bad input if `output` is the file `input`, which is `what`: the rename would destroy it. Either may be "".
void require_other_file(const std::string& output, const std::string& input, const std::string& what);

/// From here on SIGHUP, SIGINT and SIGTERM remove all uncommitted files and end the process at once, with
/// exit code 129, 130 or 143.
void remove_on_interrupt();

}  // namespace lmhead::tools
