// A CollectiveRound coordinates the collectives of a group of threads. Each member arrives with a contribution and may
// continue; the last to arrive runs the collective on all contributions, and each member waits for it later. The
// members' first arrivals form round 0, their second ones round 1, and so on.
//
//   CollectiveRound<Tensors> rounds(/*members=*/4, /*spin_time=*/30us, all_reduce);
//   const std::uint64_t round = rounds.arrive(member, tensors);   // each member
//   rounds.wait(round, deadline);
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "penstock/transport/monitor.h"

namespace penstock::internal {

// Thread-safe. Each member is used by one thread at a time.
template <class Contribution>
class CollectiveRound {
 public:
  // Computes the collective from all contributions, in the order of members.
  using Collective = std::function<void(std::vector<Contribution>&)>;

  CollectiveRound(std::size_t members, Clock::duration spin_time, Collective collective)
      : collective_(std::move(collective)), monitor_(spin_time), next_round_(members, 0) {}

  // Adds a contribution and returns the round to wait for. Runs the collective, without the lock, if all other members
  // have arrived. The contribution must not be used before wait() has returned.
  std::uint64_t arrive(std::size_t member, Contribution contribution) PENSTOCK_EXCLUDES(monitor_) {
    MonitorLock lock(monitor_);
    const std::uint64_t number = next_round_[member]++;
    Round& round = rounds_[number];
    round.contributions.resize(next_round_.size());
    round.contributions[member] = std::move(contribution);
    if (++round.arrived < next_round_.size()) return number;
    std::vector<Contribution> contributions = std::move(round.contributions);
    lock.unlock();
    std::exception_ptr error;
    try {
      collective_(contributions);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    round.is_done = true;
    round.error = error;
    monitor_.notify_all();
    return number;
  }

  // Blocks until the collective of this round has run. Rethrows its exception on every member. Each member waits for
  // each of its rounds until one wait is Ready.
  WaitResult wait(std::uint64_t number, Deadline deadline) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    Round& round = rounds_[number];
    const WaitResult result = monitor_.wait(deadline, [&round] { return round.is_done; });
    if (result != WaitResult::Ready) return result;
    const std::exception_ptr error = round.error;
    if (++round.departed == next_round_.size()) rounds_.erase(number);
    if (error) std::rethrow_exception(error);
    return result;
  }

  // Ends all current and future waits for rounds that are not done.
  void close() PENSTOCK_EXCLUDES(monitor_) { monitor_.close(); }

 private:
  struct Round {
    std::vector<Contribution> contributions;
    // Number of members that have called arrive(), and of those whose wait() has returned Ready.
    std::size_t arrived = 0;
    std::size_t departed = 0;
    bool is_done = false;
    std::exception_ptr error;
  };

  const Collective collective_;
  // A leaf lock: no other is acquired while it is held.
  Monitor monitor_;
  // The round of each member's next arrival.
  std::vector<std::uint64_t> next_round_ PENSTOCK_GUARDED_BY(monitor_);
  // The rounds that not all members have departed from. Elements keep their address while others are added or erased.
  std::map<std::uint64_t, Round> rounds_ PENSTOCK_GUARDED_BY(monitor_);
};

}  // namespace penstock::internal
