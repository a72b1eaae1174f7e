#include "penstock/transport/processes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): kill is POSIX's
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/tensor/values.h"
#include "tests/transport/rank_program.h"
#include "tests/transport/ranks.h"

namespace penstock::testing {

// GoogleTest finds it here.
void PrintTo(const ProcessEnd& end, std::ostream* out) {
  *out << to_string(end);
}

namespace {

using Ends = std::vector<ProcessEnd>;

// It lies beside the test.
std::string rank_program() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "penstock_rank_program";
}

ProcessOptions options(int ranks, std::vector<std::string> arguments) {
  return {.program = rank_program(),
          .arguments = std::move(arguments),
          .ranks = ranks,
          .environment = {},
          .grace = std::chrono::seconds(60)};
}

ProcessEnd exited(int code) {
  return {.how = ProcessEnd::How::Exited, .code = code};
}
ProcessEnd signalled(int code) {
  return {.how = ProcessEnd::How::Signalled, .code = code};
}
constexpr ProcessEnd kKilled = {.how = ProcessEnd::How::Killed, .code = SIGKILL};

// Whether this process has a child with that number, running or not.
bool is_child(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

std::size_t open_files() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

TEST(ProcessRanks, CollectTheirExitCodes) {
  ProcessRanks good(options(3, {"code", "0"}));
  EXPECT_EQ(good.wait(far()), (Ends{exited(0), exited(0), exited(0)}));
  ProcessRanks bad(options(3, {"code", "9"}));
  EXPECT_EQ(bad.wait(far()), (Ends{exited(0), exited(9), exited(0)}));
}

TEST(ProcessRanks, HaveTheEnvironmentThatTheyAreGiven) {
  ::setenv("TORCHELASTIC_RUN_ID", "another run", 1);
  ProcessOptions with = options(2, {"environment"});
  with.environment["PENSTOCK_TEST_GIVEN"] = "given";
  ProcessRanks ranks(with);
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(0), exited(0)}));
  ::unsetenv("TORCHELASTIC_RUN_ID");
}

TEST(ProcessRanks, SayWhatCannotBeStarted) {
  ProcessOptions missing = options(2, {});
  missing.program = "/nowhere/at-all";
  expect_error<std::runtime_error>([&] { const ProcessRanks ranks(missing); },
                                   "'/nowhere/at-all' cannot be started as rank 0: No such file or directory.");
  expect_error<std::invalid_argument>([] { const ProcessRanks ranks(options(0, {})); },
                                      "there are 0 ranks to start, expected one at least.");
}

TEST(ProcessRanks, AreKilledWhenOneHasFailedAndTheGraceIsOver) {
  ProcessOptions quick = options(3, {"fail-alone"});
  quick.grace = std::chrono::milliseconds(10);
  ProcessRanks ranks(quick);
  EXPECT_EQ(ranks.wait(far()), (Ends{kKilled, exited(7), kKilled}));
}

TEST(ProcessRanks, AreKilledAtTheDeadline) {
  ProcessRanks ranks(options(2, {"sleep"}));
  EXPECT_EQ(ranks.wait(soon()), (Ends{kKilled, kKilled}));
}

TEST(ProcessRanks, LeaveNothingWhenTheyAreNotWaitedFor) {
  const std::size_t files = open_files();
  std::vector<pid_t> pids;
  {
    const ProcessRanks ranks(options(3, {"sleep"}));
    for (int rank = 0; rank < ranks.size(); ++rank) pids.push_back(ranks.pid(rank));
    for (const pid_t pid : pids) EXPECT_TRUE(is_child(pid));
  }
  for (const pid_t pid : pids) EXPECT_FALSE(is_child(pid));
  EXPECT_EQ(open_files(), files);
}

TEST(ProcessRanks, SayHowTheyEnded) {
  EXPECT_EQ(to_string(exited(3)), "exited with 3");
  EXPECT_EQ(to_string(signalled(SIGSEGV)), "ended by signal 11 (Segmentation fault)");
  EXPECT_EQ(to_string(kKilled), "was killed");
  EXPECT_EQ(to_string(ProcessEnd{}), "is running");
}

TEST(ProcessRanks, SendTensorsToOneAnother) {
  for (const int count : {2, 4}) {
    ProcessRanks ranks(options(count, {"ring"}));
    EXPECT_EQ(ranks.wait(far()), Ends(static_cast<std::size_t>(count), exited(0)));
  }
}

// In all of what follows the others would wait for two minutes if they noticed nothing, which is as long as the test
// does.
TEST(LostRank, IsNoticedByAllOthersWhenItIsKilled) {
  ProcessRanks ranks(options(4, {"kill"}));
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kGone + 3), exited(kGone + 3), exited(kGone + 3), signalled(SIGKILL)}));
}

// A child that a rank has forked has copies of its sockets. The others would wait for their timeout if it kept them open.
TEST(LostRank, IsNoticedAlthoughItsChildrenLive) {
  for (const char* what : {"kill-with-child", "kill-with-program"}) {
    SCOPED_TRACE(what);
    int ends[2] = {};
    ASSERT_EQ(::pipe(ends), 0);
    const Descriptor child_end(ends[0]);
    const Descriptor own_end(ends[1]);
    // The child ends when nobody has this end any more.
    ::fcntl(own_end.number(), F_SETFD, FD_CLOEXEC);
    ProcessOptions with = options(3, {what, "20"});
    with.environment["PENSTOCK_TEST_PIPE"] = std::to_string(child_end.number());
    ProcessRanks ranks(with);
    EXPECT_EQ(ranks.wait(far()), (Ends{exited(kGone + 2), exited(kGone + 2), signalled(SIGKILL)}));
  }
}

TEST(LostRank, IsNoticedByAllOthersWhenItExits) {
  ProcessRanks ranks(options(4, {"exit"}));
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kGone + 3), exited(kGone + 3), exited(kGone + 3), exited(3)}));
}

TEST(LostRank, TellsAllOthersWhenItAborts) {
  ProcessRanks ranks(options(4, {"abort"}));
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kAborted), exited(kAborted), exited(kAborted), exited(kAborter)}));
}

// A stopped process has not gone: the first deadline to pass ends the others.
TEST(LostRank, IsLateWhenItIsStopped) {
  ProcessOptions with = options(2, {"stop", "0.5"});
  with.grace = std::chrono::milliseconds(10);
  ProcessRanks ranks(with);
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kLate + 1), kKilled}));
}

TEST(LostRank, EndsAllOthersWhenItIsStopped) {
  ProcessOptions with = options(4, {"stop", "0.5"});
  with.grace = std::chrono::seconds(5);
  ProcessRanks ranks(with);
  const Ends ends = ranks.wait(far());
  int late = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const int code = ends[static_cast<std::size_t>(rank)].code;
    // Each was late for another rank, or was told by one that was.
    if (code == kAbortedByOther) continue;
    EXPECT_TRUE(code >= kLate - 1 && code <= kLate + 3) << "rank " << rank << ": " << code;
    ++late;
  }
  EXPECT_GE(late, 1);
  EXPECT_EQ(ends[3], kKilled);
}

}  // namespace
}  // namespace penstock::testing
