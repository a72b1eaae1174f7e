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

#include "penstock/transport/sockets.h"
#include "tests/tensor/values.h"
#include "tests/transport/rank_program.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {

// GoogleTest finds it here.
void PrintTo(const ProcessEnd& end, std::ostream* out) {
  *out << to_string(end);
}

namespace {

using Ends = std::vector<ProcessEnd>;

// Returns the path of the program, which is in the directory of the test.
std::string rank_program() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "penstock_rank_program";
}

ProcessOptions options(int ranks, std::vector<std::string> arguments) {
  return {.program = rank_program(),
          .arguments = std::move(arguments),
          .ranks = ranks,
          .environment = {},
          .grace_period = std::chrono::seconds(60)};
}

ProcessEnd exited(int code) {
  return {.how = ProcessEnd::How::Exited, .code = code};
}
ProcessEnd signalled(int code) {
  return {.how = ProcessEnd::How::Signalled, .code = code};
}
constexpr ProcessEnd kKilled = {.how = ProcessEnd::How::Killed, .code = SIGKILL};

// Returns true if this process has a child with this id, running or not reaped.
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

TEST(ProcessRanks, GetTheEnvironmentOfTheOptions) {
  ::setenv("TORCHELASTIC_RUN_ID", "another run", 1);
  ProcessOptions with = options(2, {"environment"});
  with.environment["PENSTOCK_TEST_GIVEN"] = "given";
  ProcessRanks ranks(with);
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(0), exited(0)}));
  ::unsetenv("TORCHELASTIC_RUN_ID");
}

TEST(ProcessRanks, NameTheProgramThatCannotBeStarted) {
  ProcessOptions missing = options(2, {});
  missing.program = "/nowhere/at-all";
  expect_error<std::runtime_error>([&] { const ProcessRanks ranks(missing); },
                                   "'/nowhere/at-all' cannot be started as rank 0: No such file or directory.");
  expect_error<std::invalid_argument>([] { const ProcessRanks ranks(options(0, {})); },
                                      "there are 0 ranks to start, expected one at least.");
}

TEST(ProcessRanks, AreKilledWhenTheGracePeriodAfterAFailureIsOver) {
  ProcessOptions quick = options(3, {"fail-alone"});
  quick.grace_period = std::chrono::milliseconds(10);
  ProcessRanks ranks(quick);
  EXPECT_EQ(ranks.wait(far()), (Ends{kKilled, exited(7), kKilled}));
}

TEST(ProcessRanks, AreKilledAtTheDeadline) {
  ProcessRanks ranks(options(2, {"sleep"}));
  EXPECT_EQ(ranks.wait(soon()), (Ends{kKilled, kKilled}));
}

TEST(ProcessRanks, LeaveNoProcessWhenDestroyedWithoutAWait) {
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

TEST(ProcessRanks, DescribeHowTheyEnded) {
  EXPECT_EQ(to_string(exited(3)), "exited with 3");
  EXPECT_EQ(to_string(signalled(SIGSEGV)), "ended by signal 11 (Segmentation fault)");
  EXPECT_EQ(to_string(kKilled), "was killed");
  EXPECT_EQ(to_string(ProcessEnd{}), "is running");
}

TEST(ProcessRanks, SendTensorsToEachOther) {
  for (const int count : {2, 4}) {
    ProcessRanks ranks(options(count, {"ring"}));
    EXPECT_EQ(ranks.wait(far()), Ends(static_cast<std::size_t>(count), exited(0)));
  }
}

// In the tests below the other ranks would wait for two minutes, as long as the test, if they did not detect the
// failure.
TEST(LostRank, IsDetectedByAllOthersWhenItIsKilled) {
  ProcessRanks ranks(options(4, {"kill"}));
  EXPECT_EQ(ranks.wait(far()),
            (Ends{exited(kPeerLost + 3), exited(kPeerLost + 3), exited(kPeerLost + 3), signalled(SIGKILL)}));
}

// A child that a rank has forked inherits its sockets. If it kept them open, the other ranks would wait for their
// timeout.
TEST(LostRank, IsDetectedAlthoughItsChildrenLive) {
  for (const char* mode : {"kill-with-child", "kill-with-program"}) {
    SCOPED_TRACE(mode);
    int ends[2] = {};
    ASSERT_EQ(::pipe(ends), 0);
    const Descriptor child_end(ends[0]);
    const Descriptor parent_end(ends[1]);
    // The child ends when all copies of this end are closed.
    ::fcntl(parent_end.number(), F_SETFD, FD_CLOEXEC);
    ProcessOptions with = options(3, {mode, "20"});
    with.environment["PENSTOCK_TEST_PIPE"] = std::to_string(child_end.number());
    ProcessRanks ranks(with);
    EXPECT_EQ(ranks.wait(far()), (Ends{exited(kPeerLost + 2), exited(kPeerLost + 2), signalled(SIGKILL)}));
  }
}

TEST(LostRank, IsDetectedByAllOthersWhenItExits) {
  ProcessRanks ranks(options(4, {"exit"}));
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kPeerLost + 3), exited(kPeerLost + 3), exited(kPeerLost + 3), exited(3)}));
}

TEST(LostRank, NotifiesAllOthersWhenItAborts) {
  ProcessRanks ranks(options(4, {"abort"}));
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kAborted), exited(kAborted), exited(kAborted), exited(kAborter)}));
}

// A stopped process keeps its connections, so the first deadline that passes ends the others.
TEST(LostRank, CausesATimeoutWhenItIsStopped) {
  ProcessOptions with = options(2, {"stop", "0.5"});
  with.grace_period = std::chrono::milliseconds(10);
  ProcessRanks ranks(with);
  EXPECT_EQ(ranks.wait(far()), (Ends{exited(kTimeout + 1), kKilled}));
}

TEST(LostRank, EndsAllOthersWhenItIsStopped) {
  ProcessOptions with = options(4, {"stop", "0.5"});
  with.grace_period = std::chrono::seconds(5);
  ProcessRanks ranks(with);
  const Ends ends = ranks.wait(far());
  int timeouts = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const int code = ends[static_cast<std::size_t>(rank)].code;
    // Each rank ran into its deadline, or was notified by one that did.
    if (code == kAbortedByOther) continue;
    EXPECT_TRUE(code >= kTimeout - 1 && code <= kTimeout + 3) << "rank " << rank << ": " << code;
    ++timeouts;
  }
  EXPECT_GE(timeouts, 1);
  EXPECT_EQ(ends[3], kKilled);
}

}  // namespace
}  // namespace penstock::internal::testing
