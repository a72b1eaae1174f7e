// What the tests of processes start as a rank. Its first argument says what it does, and its exit code how it went.
#include "tests/transport/rank_program.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "penstock/transport/c10d.h"
#include "penstock/transport/rendezvous.h"
#include "penstock/transport/transport.h"

namespace penstock::testing {
namespace {

constexpr Tag kTag{.channel = 0, .number = 0};

Deadline within(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::unique_ptr<Transport> connect() {
  return c10d_transport(rendezvous(std::chrono::seconds(60)));
}

// Some steps around a ring, and a sum.
int ring(Transport& transport) {
  const int next = (transport.rank() + 1) % transport.ranks();
  const int last = (transport.rank() + transport.ranks() - 1) % transport.ranks();
  std::vector<int> everybody;
  for (int rank = 0; rank < transport.ranks(); ++rank) everybody.push_back(rank);
  const auto group = transport.group(everybody);
  for (int step = 0; step < 20; ++step) {
    transport.begin_step(1);
    transport.post_receive(last, kTag);
    transport.send(next, kTag, {at::full({10'000}, transport.rank() * 100 + step)}, within(60));
    const at::Tensor found = transport.receive(last, kTag, within(60))[0];
    if (!at::equal(found, at::full({10'000}, last * 100 + step))) return kWrong;
    at::Tensor sum = at::full({30'000}, transport.rank());
    group->all_reduce({sum})->wait(within(60));
    if (!at::equal(sum, at::full({30'000}, transport.ranks() * (transport.ranks() - 1) / 2))) return kWrong;
    transport.end_step(within(60));
  }
  group->barrier()->wait(within(60));
  return 0;
}

// Each in a wait of another kind, so that all are seen to end.
void wait_for(Transport& transport, Group& group, int victim, double seconds) {
  switch (transport.rank() % 3) {
    // For the one that does not come.
    case 0: transport.receive(victim, kTag, within(seconds)); break;
    // For one that is well.
    case 1: transport.receive(0, {.channel = 1, .number = 5}, within(seconds)); break;
    default: group.barrier()->wait(within(seconds));
  }
}

// Leaves a child behind that lives until whoever has started the ranks closes the other end of a pipe: a program when
// `exec`, else a copy of this process. PENSTOCK_TEST_PIPE names this end.
void leave_a_child(bool exec) {
  const int end = std::atoi(std::getenv("PENSTOCK_TEST_PIPE"));
  if (::fork() != 0) return;
  if (exec) {
    ::dup2(end, STDIN_FILENO);
    ::execlp("cat", "cat", nullptr);
  }
  char byte = 0;
  while (::read(end, &byte, 1) > 0) continue;
  std::_Exit(0);
}

// The last rank does something to itself, and the others wait.
int lose(Transport& transport, const std::string& what, double seconds) {
  const int victim = transport.ranks() - 1;
  std::vector<int> everybody;
  for (int rank = 0; rank < transport.ranks(); ++rank) everybody.push_back(rank);
  const auto group = transport.group(everybody);
  if (transport.rank() == victim) {
    // Once all have come.
    group->barrier()->wait(within(60));
    if (what == "kill-with-child") leave_a_child(/*exec=*/false);
    if (what == "kill-with-program") leave_a_child(/*exec=*/true);
    if (what.starts_with("kill")) std::raise(SIGKILL);
    if (what == "stop") std::raise(SIGSTOP);
    if (what == "exit") std::_Exit(3);
    transport.abort("the last rank has had enough");
    return kAborter;
  }
  try {
    group->barrier()->wait(within(60));
    wait_for(transport, *group, victim, seconds);
  } catch (const TransportError& error) {
    std::cerr << "rank " << transport.rank() << ": " << error.what() << "\n";
    transport.abort("rank " + std::to_string(transport.rank()) + " has failed");
    switch (error.why()) {
      case TransportError::Why::Timeout: return kLate + error.peer();
      case TransportError::Why::PeerLost: return kGone + error.peer();
      default: return error.what() == std::string("the last rank has had enough") ? kAborted : kAbortedByOther;
    }
  }
  return kNothing;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 120;
  const char* const named = std::getenv("RANK");
  const int rank = named == nullptr ? 0 : std::atoi(named);
  if (what == "code") return rank == 1 ? argc > 2 ? std::atoi(argv[2]) : 1 : 0;
  if (what == "sleep") {
    std::this_thread::sleep_for(std::chrono::hours(1));
    return 0;
  }
  if (what == "fail-alone") {
    if (rank == 1) return 7;
    std::this_thread::sleep_for(std::chrono::hours(1));
    return 0;
  }
  if (what == "environment") {
    const char* given = std::getenv("PENSTOCK_TEST_GIVEN");
    return given != nullptr && given == std::string("given") && std::getenv("TORCHELASTIC_RUN_ID") == nullptr ? 0 : 1;
  }
  const auto transport = connect();
  return what == "ring" ? ring(*transport) : lose(*transport, what, seconds);
}

}  // namespace
}  // namespace penstock::testing

int main(int argc, char** argv) {
  try {
    return penstock::testing::main(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "a rank has failed: " << error.what() << "\n";
    return penstock::testing::kWrong;
  }
}
