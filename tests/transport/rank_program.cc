// The program that tests start as process ranks. Its first argument selects what it does, and its exit code tells the
// result.
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

namespace penstock::internal::testing {
namespace {

constexpr Tag kTag{.channel = 0, .number = 0};

Deadline within(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::unique_ptr<Transport> connect() {
  return c10d_transport(rendezvous(std::chrono::seconds(60)));
}

// Sends messages around a ring and sums over all ranks, for some steps.
int ring(Transport& transport) {
  const int next = (transport.rank() + 1) % transport.ranks();
  const int previous = (transport.rank() + transport.ranks() - 1) % transport.ranks();
  std::vector<int> all_ranks;
  for (int rank = 0; rank < transport.ranks(); ++rank) all_ranks.push_back(rank);
  const auto group = transport.group(all_ranks);
  for (int step = 0; step < 20; ++step) {
    transport.begin_step(1);
    transport.post_receive(previous, kTag);
    transport.send(next, kTag, {at::full({10'000}, transport.rank() * 100 + step)}, within(60));
    const at::Tensor found = transport.receive(previous, kTag, within(60))[0];
    if (!at::equal(found, at::full({10'000}, previous * 100 + step))) return kWrong;
    at::Tensor sum = at::full({30'000}, transport.rank());
    group->all_reduce({sum})->wait(within(60));
    if (!at::equal(sum, at::full({30'000}, transport.ranks() * (transport.ranks() - 1) / 2))) return kWrong;
    transport.end_step(within(60));
  }
  group->barrier()->wait(within(60));
  return 0;
}

// Waits in a different way on each rank, so that tests see all kinds of waits end.
void wait_for(Transport& transport, Group& group, int victim, double seconds) {
  switch (transport.rank() % 3) {
    // Waits for the lost rank.
    case 0: transport.receive(victim, kTag, within(seconds)); break;
    // Waits for a healthy rank.
    case 1: transport.receive(0, {.channel = 1, .number = 5}, within(seconds)); break;
    default: group.barrier()->wait(within(seconds));
  }
}

// Starts a child that lives until the test closes the other end of a pipe: a program if `exec`, otherwise a fork of
// this process. PENSTOCK_TEST_PIPE is the descriptor of this end.
void start_child(bool exec) {
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

// Loses the last rank in the way that `mode` names, while the others wait.
int lose(Transport& transport, const std::string& mode, double seconds) {
  const int victim = transport.ranks() - 1;
  std::vector<int> all_ranks;
  for (int rank = 0; rank < transport.ranks(); ++rank) all_ranks.push_back(rank);
  const auto group = transport.group(all_ranks);
  if (transport.rank() == victim) {
    group->barrier()->wait(within(60));
    if (mode == "kill-with-child") start_child(/*exec=*/false);
    if (mode == "kill-with-program") start_child(/*exec=*/true);
    if (mode.starts_with("kill")) std::raise(SIGKILL);
    if (mode == "stop") std::raise(SIGSTOP);
    if (mode == "exit") std::_Exit(3);
    transport.abort("the last rank has aborted");
    return kAborter;
  }
  try {
    group->barrier()->wait(within(60));
    wait_for(transport, *group, victim, seconds);
  } catch (const TransportError& error) {
    std::cerr << "rank " << transport.rank() << ": " << error.what() << "\n";
    transport.abort("rank " + std::to_string(transport.rank()) + " has failed");
    switch (error.why()) {
      case TransportError::Why::Timeout: return kTimeout + error.peer();
      case TransportError::Why::PeerLost: return kPeerLost + error.peer();
      default: return error.what() == std::string("the last rank has aborted") ? kAborted : kAbortedByOther;
    }
  }
  return kNothing;
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 120;
  const char* const named = std::getenv("RANK");
  const int rank = named == nullptr ? 0 : std::atoi(named);
  if (mode == "code") return rank == 1 ? argc > 2 ? std::atoi(argv[2]) : 1 : 0;
  if (mode == "sleep") {
    std::this_thread::sleep_for(std::chrono::hours(1));
    return 0;
  }
  if (mode == "fail-alone") {
    if (rank == 1) return 7;
    std::this_thread::sleep_for(std::chrono::hours(1));
    return 0;
  }
  if (mode == "environment") {
    const char* given = std::getenv("PENSTOCK_TEST_GIVEN");
    return given != nullptr && given == std::string("given") && std::getenv("TORCHELASTIC_RUN_ID") == nullptr ? 0 : 1;
  }
  const auto transport = connect();
  return mode == "ring" ? ring(*transport) : lose(*transport, mode, seconds);
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  try {
    return penstock::internal::testing::main(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "a rank has failed: " << error.what() << "\n";
    return penstock::internal::testing::kWrong;
  }
}
