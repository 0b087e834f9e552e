// The tuning cache: whatever a file holds, a call runs and a warning names it; writers at once lose nothing.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "core/configuration.h"
#include "core/implementation.h"
#include "gtest/gtest.h"
#include "lmhead/tuning.h"

namespace lmhead {
namespace {

namespace fs = std::filesystem;

const TuningSource kSource{"cpu", "a CPU, 2 threads", "none", "a GEMM library", "9.9.9"};

TuningKey key(std::int64_t h) {
  return {Operation::kForward, token_bucket(4096), h, 131072, DType::kBFloat16, true, false};
}

/// An empty cache folder for each test, and its variables.
class Tuning : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lmhead_tuning.XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    ::setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  }
  void TearDown() override { fs::remove_all(folder_); }

  TuningTable read(const TuningSource& source = kSource) {
    return read_tuning(tuning_file(kSource), source, &warning_);
  }
  void put(const std::string& text) {
    fs::create_directories(tuning_file(kSource).parent_path());
    std::ofstream(tuning_file(kSource)) << text;
  }
  static std::string text() {
    std::ostringstream content;
    content << std::ifstream(tuning_file(kSource)).rdbuf();
    return content.str();
  }
  void expect_ignored(const std::string& why) {
    EXPECT_TRUE(read().empty()) << why;
    EXPECT_NE(warning_.find(tuning_file(kSource).string()), std::string::npos) << warning_;
    EXPECT_NE(warning_.find(why), std::string::npos) << warning_;
  }

  fs::path folder_;
  std::string warning_;
};

/// Exit status of fn in a process of its own: what it learns of cache files ends with it.
int in_child(const std::function<bool()>& fn) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(fn() ? 0 : 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(TokenBucket, IsTheNextPowerOfTwoWithinLimits) {
  for (const auto& [tokens, bucket] : {std::pair{1, 128}, {128, 128}, {129, 256}, {20000, 32768}, {262144, 262144}})
    EXPECT_EQ(token_bucket(tokens), bucket) << tokens;
  EXPECT_EQ(token_bucket(262145), 524288);
  EXPECT_EQ(token_bucket(std::int64_t{1} << 40), std::int64_t{1} << 20);
  EXPECT_EQ(token_bucket(-5), 128);
}

TEST_F(Tuning, FileFollowsTheSource) {
  EXPECT_EQ(tuning_file(kSource).parent_path(), folder_ / "lmhead");
  for (std::string TuningSource::*member : {&TuningSource::backend, &TuningSource::device, &TuningSource::driver,
                                            &TuningSource::library, &TuningSource::version}) {
    TuningSource other = kSource;
    other.*member += "2";
    EXPECT_NE(tuning_file(other), tuning_file(kSource));
  }
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  ::setenv("HOME", "/home/somebody", 1);
  EXPECT_EQ(tuning_file(kSource).parent_path(), "/home/somebody/.cache/lmhead");
  ::unsetenv("HOME");
  EXPECT_TRUE(tuning_file(kSource).empty());
  EXPECT_FALSE(write_tuning({}, kSource, {}).ok());
  EXPECT_TRUE(read_tuning({}, kSource, &warning_).empty());
  EXPECT_EQ(warning_, "");
}

TEST_F(Tuning, KeepsChoicesAndMerges) {
  EXPECT_TRUE(read().empty());
  EXPECT_EQ(warning_, "");
  TuningKey backward = key(4096);
  backward.operation = Operation::kBackward;
  backward.general = true;
  ASSERT_TRUE(write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_64"}, {backward, "default"}}).ok());
  ASSERT_TRUE(write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_128"}, {key(8192), "default"}}).ok());
  const TuningTable expected{{key(4096), "rows_128"}, {backward, "default"}, {key(8192), "default"}};
  EXPECT_EQ(read(), expected);
  EXPECT_EQ(warning_, "");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "lmhead"), {}), 2) << "the file and its lock";
}

TEST_F(Tuning, BrokenFilesAreIgnoredAndReplaced) {
  ASSERT_TRUE(write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_64"}, {key(8192), "rows_128"}}).ok());
  const std::string good = text();
  for (std::size_t length = 1; length + 1 < good.size(); ++length) {  // cut off anywhere
    put(good.substr(0, length));
    ASSERT_TRUE(read().empty()) << length;
    ASSERT_NE(warning_, "") << length;
  }
  put(std::string("\0\1\xff not text", 12));
  expect_ignored("first line");
  put("lmhead tuning 0\n" + good.substr(good.find('\n') + 1));
  expect_ignored("first line");
  for (const char* line :
       {"forward 4096 4096 131072 bfloat16 entropy - rows_64 more", "forward 4096 4096 131072",
        "sideways 4096 4096 131072 bfloat16 entropy - rows_64", "forward 4096 4096 131072 bfloat16 perhaps - rows_64",
        "forward 4096 4096  131072 bfloat16 entropy - rows_64", "forward +4096 4096 131072 bfloat16 entropy - rows_64",
        "forward 5000 4096 131072 bfloat16 entropy - rows_64", "forward 4096 -1 131072 bfloat16 entropy - rows_64",
        "forward 4096 99999999999999999999 1 bfloat16 entropy - rows_64",
        "forward 4096 4096 131072 int32 entropy - rows_64", ""}) {
    put(good.substr(0, good.find("forward")) + line + "\nend 1\n");
    expect_ignored("line 7 is broken");
  }
  put(std::string(std::size_t{2} << 20, 'x'));
  expect_ignored("at most 1 MiB");
  ASSERT_TRUE(write_tuning(tuning_file(kSource), kSource, {{key(64), "rows_64"}}).ok());
  EXPECT_EQ(read(), (TuningTable{{key(64), "rows_64"}}));
  fs::remove(tuning_file(kSource));
  fs::create_directory(tuning_file(kSource));
  expect_ignored("a regular file");
  EXPECT_FALSE(write_tuning(tuning_file(kSource), kSource, {{key(64), "rows_64"}}).ok());
}

TEST_F(Tuning, ForeignFilesAreIgnored) {
  ASSERT_TRUE(write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_64"}}).ok());
  for (std::string TuningSource::*member : {&TuningSource::backend, &TuningSource::device, &TuningSource::driver,
                                            &TuningSource::library, &TuningSource::version}) {
    TuningSource other = kSource;  // as if the file had been copied from another machine or version
    other.*member += "2";
    EXPECT_TRUE(read(other).empty());
    EXPECT_NE(warning_.find("expected \""), std::string::npos) << warning_;
  }
}

TEST_F(Tuning, FolderThatCannotBeWritten) {
  const fs::path sealed = folder_ / "sealed";
  fs::create_directories(sealed / "lmhead");
  ::setenv("XDG_CACHE_HOME", sealed.c_str(), 1);
  fs::permissions(folder_, fs::perms::all);
  fs::permissions(sealed / "lmhead",
                  fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  EXPECT_EQ(in_child([] {
              if (::geteuid() == 0 && ::seteuid(65534) != 0) return false;  // permissions do not bind root
              const Status status = write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_64"}});
              return !status.ok() && status.message().find("cannot create") != std::string::npos;
            }),
            0);
  ::setenv("XDG_CACHE_HOME", "/proc", 1);
  EXPECT_FALSE(write_tuning(tuning_file(kSource), kSource, {{key(4096), "rows_64"}}).ok());
}

TEST_F(Tuning, ProcessesAtOnceLoseNothing) {
  constexpr int kProcesses = 4, kEach = 25;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    bool ok = true;
    for (int i = 0; i < kEach; ++i) {
      ok = ok && write_tuning(tuning_file(kSource), kSource, {{key(1 + p * kEach + i), "rows_64"}}).ok();
      std::string warning;
      ok = ok && !read_tuning(tuning_file(kSource), kSource, &warning).empty() && warning.empty();
    }
    ::_exit(ok ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(std::ssize(read()), kProcesses * kEach);
}

/// A problem of the cpu backend in which the tile's rows show in the size of the workspace.
struct Probe {
  std::vector<float> x = std::vector<float>(512 * 64), w = std::vector<float>(4096 * 64);
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(512);

  std::size_t bytes(const char* configuration) const {
    Problem p;
    p.hidden = {x.data(), 512, 64, 64, DType::kFloat32};
    p.weight = {w.data(), 4096, 64, 64, DType::kFloat32};
    p.targets = {ids.data(), 512, 1, DType::kInt64};
    Execution e;
    e.backend = "cpu", e.configuration = configuration, e.threads = 1;
    const Result<WorkspaceSize> size = workspace_size(p, Operation::kForward, {}, e);
    return size.ok() ? size->bytes : 0;
  }
  TuningKey key() const { return {Operation::kForward, 512, 64, 4096, DType::kFloat32, false, false}; }
};

TEST_F(Tuning, CallsTakeTheTunedConfiguration) {
  const TuningSource& source = **kBlockedCpu.tuning_source();
  const Probe probe;
  ASSERT_NE(probe.bytes("rows_128"), probe.bytes("default"));
  ASSERT_TRUE(write_tuning(tuning_file(source), source, {{probe.key(), "rows_128"}}).ok());
  EXPECT_EQ(in_child([&] { return probe.bytes("auto") == probe.bytes("rows_128"); }), 0);
  ASSERT_TRUE(write_tuning(tuning_file(source), source, {{probe.key(), "of_a_later_version"}}).ok());
  EXPECT_EQ(in_child([&] { return probe.bytes("auto") == probe.bytes("default"); }), 0);
  std::ofstream(tuning_file(source)) << "garbage";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(in_child([&] {
              return probe.bytes("auto") == probe.bytes("default") && probe.bytes("auto") == probe.bytes("default");
            }),
            0);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("lmhead: warning: tuning cache: " + tuning_file(source).string() + " is ignored"),
            std::string::npos);
  EXPECT_EQ(said.find("lmhead: warning", 1), std::string::npos) << "once a process: " << said;
}

TEST_F(Tuning, ChoicesHoldForTheProcessWithoutAFile) {
  const TuningSource& source = **kBlockedCpu.tuning_source();
  const Probe probe;
  TuningKey other = probe.key();
  other.h = 128;
  EXPECT_EQ(in_child([&] {
              adopt_tuning(source, {{probe.key(), "rows_128"}});
              adopt_tuning(source, {{other, "rows_64"}});
              return probe.bytes("auto") == probe.bytes("rows_128");
            }),
            0);
}

TEST_F(Tuning, UnknownConfigurationIsAnError) {
  Problem p;
  const float x[2] = {}, w[2] = {};
  const std::int64_t id = 0;
  p.hidden = {x, 1, 2, 2, DType::kFloat32};
  p.weight = {w, 1, 2, 2, DType::kFloat32};
  p.targets = {&id, 1, 1, DType::kInt64};
  Execution e;
  e.backend = "cpu", e.configuration = "fastest";
  const Result<WorkspaceSize> size = workspace_size(p, Operation::kForward, {}, e);
  EXPECT_EQ(size.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(size.status().message(),
            "configuration: expected auto, default, rows_64, rows_128 of backend cpu, got fastest");
  EXPECT_EQ(configurations("reference", Operation::kForward), std::vector<std::string>{"default"});
  EXPECT_TRUE(configurations("abacus", Operation::kForward).empty());
}

TEST_F(Tuning, TuneMeasuresSavesAndIsUsed) {
  const TuneRequest request{.tokens = 300, .hidden = 64, .vocab = 3000, .dtype = DType::kFloat32, .seconds = 0.1};
  const auto begin = std::chrono::steady_clock::now();
  const Result<std::vector<TuneResult>> results = tune(request);
  ASSERT_TRUE(results.ok()) << results.status().message();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  ASSERT_EQ(results->size(), 1u) << "the cpu backend has configurations of the forward alone";
  const TuneResult& r = results->front();
  EXPECT_EQ(r.backend, "cpu");
  EXPECT_EQ(r.operation, Operation::kForward);
  EXPECT_EQ(r.bucket, 512);
  EXPECT_GE(r.turns, 3);
  ASSERT_EQ(r.times.size(), 3u);
  EXPECT_EQ(r.times[0].configuration, "default");
  EXPECT_EQ(r.times[0].of_default, 1.0);
  for (const TunedTime& t : r.times) {
    EXPECT_GT(t.ms, 0);
    if (t.configuration == r.configuration && t.configuration != "default") {
      EXPECT_LE(t.of_default, 0.98);
    }
  }
  EXPECT_EQ(r.warning, "");
  const TuningSource& source = **kBlockedCpu.tuning_source();
  EXPECT_EQ(r.file, tuning_file(source).string());
  const TuningTable saved = read_tuning(r.file, source, &warning_);
  EXPECT_EQ(saved,
            (TuningTable{{{Operation::kForward, 512, 64, 3000, DType::kFloat32, true, false}, r.configuration}}));

  ::setenv("XDG_CACHE_HOME", "/proc", 1);  // nowhere to save: the choice stands, with a warning
  const Result<std::vector<TuneResult>> unsaved = tune(request);
  ASSERT_TRUE(unsaved.ok()) << unsaved.status().message();
  EXPECT_EQ(unsaved->front().file, "");
  EXPECT_NE(unsaved->front().warning, "");
}

TEST_F(Tuning, TuneChecksItsArguments) {
  const TuneRequest good{.tokens = 8, .hidden = 8, .vocab = 8};
  const auto message = [](const TuneRequest& request) { return tune(request).status().message(); };
  TuneRequest r = good;
  r.tokens = 0;
  EXPECT_EQ(message(r), "tokens: expected at least 1 and less than 2^31, got 0");
  r = good, r.vocab = -3;
  EXPECT_EQ(message(r), "vocab: expected at least 1 and less than 2^31, got -3");
  r = good, r.dtype = DType::kInt32;
  EXPECT_EQ(message(r), "dtype: expected bfloat16, float16 or float32, got int32");
  r = good, r.seconds = 0;
  EXPECT_NE(message(r).find("seconds: expected a number > 0"), std::string::npos);
  r = good, r.backend = "abacus";
  EXPECT_NE(message(r).find("backend: expected auto"), std::string::npos);
  r = good, r.backend = "reference";
  EXPECT_TRUE(tune(r).ok() && (*tune(r)).empty()) << "nothing to choose";
}

}  // namespace
}  // namespace lmhead
