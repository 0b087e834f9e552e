// The subcommands of the `lmhead` command, and how they report errors.
//
// add_NAME registers one subcommand with its options and a callback that runs it. Results go to
// stdout, everything else to stderr. A callback returns normally (exit 0) or throws CommandError.
#pragma once

#include <stdexcept>
#include <string>

#include "lmhead/status.h"

namespace CLI {
class App;  // <CLI/CLI.hpp> is slow to compile; only files that register options include it
}

namespace lmhead::tools {

enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,         ///< failed while running: I/O, memory, a bound not kept
  kExitBadInput = 2,       ///< bad usage or bad input
  kExitInterrupted = 130,  ///< SIGINT
};

/// Ends the command: main prints "lmhead: MESSAGE" on stderr and exits with the code.
class CommandError : public std::runtime_error {
 public:
  CommandError(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// A CommandError for bad usage or input (exit 2).
inline CommandError bad_input(const std::string& message) { return {kExitBadInput, message}; }
/// A CommandError for a failure while running (exit 1).
inline CommandError failed(const std::string& message) { return {kExitFailed, message}; }

/// Throws unless ok: an argument that breaks the contract is bad input, all else failed while running.
inline void require_ok(const Status& status) {
  if (status.ok()) return;
  const bool argument = status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kTypeMismatch ||
                        status.code() == StatusCode::kUnsupported;
  throw CommandError(argument ? kExitBadInput : kExitFailed, status.message());
}

void add_bench(CLI::App& app);   // bench.cc
void add_pack(CLI::App& app);    // pack.cc
void add_score(CLI::App& app);   // score.cc
void add_info(CLI::App& app);    // info.cc
void add_tune(CLI::App& app);    // tune.cc
void add_verify(CLI::App& app);  // verify.cc

}  // namespace lmhead::tools
