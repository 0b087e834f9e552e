// The `lmhead` command: exit 0 done, 1 failed while running, 2 bad usage or input, 130 interrupted.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "checks.h"
#include "commands.h"
#include "lmhead/lmhead.h"

namespace {

int report(int code, const char* message) {
  std::fprintf(stderr, "lmhead: %s\n", message);
  return code;
}

/// A file opened later must not get the number of a standard stream that the caller closed: what is meant for the
/// stream would end up in it. Writing to stdout goes on failing, since results would be lost.
void reserve_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) static_cast<void>(::open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_WRONLY));
}

int run(int argc, char** argv) {
  using namespace lmhead::tools;
  CLI::App app("Per-token log-probability and policy entropy of a language model's head, without the logits.",
               "lmhead");
  app.set_version_flag("--version", std::string("lmhead ") + lmhead::version());
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("lmhead: ") + error.what() + " (lmhead --help, lmhead COMMAND --help)\n";
  });

  add_score(app);
  add_bench(app);
  add_verify(app);
  add_info(app);
  add_pack(app);
  add_tune(app);
  for (CLI::App* command : app.get_subcommands({}))
    for (CLI::Option* option : command->get_options())
      for (const bool is_unsigned : {false, true})
        if (option->get_type_name() == (is_unsigned ? "UINT" : "INT")) option->check(integer_that_fits(is_unsigned));

  if (argc > 1 && argv[1][0] != '-') {
    std::string names;
    bool known = false;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      known = known || command->get_name() == argv[1];
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    if (!known) return report(kExitBadInput, ("expected one of " + names + ", got " + argv[1]).c_str());
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (app.exit(error) != 0) return kExitBadInput;  // else help or the version was asked for
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return report(kExitFailed, "stdout: cannot write to it");
  return kExitDone;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lmhead::tools;
  reserve_standard_streams();
  try {
    return run(argc, argv);
  } catch (const CommandError& error) {
    return report(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return report(kExitFailed, "out of memory");
  } catch (const std::exception& error) {
    return report(kExitFailed, error.what());
  }
}
