// A Meeting is where the members of a group bring a contribution each; the last to come does what is to be done with all
// of them, and the others go on meanwhile and come back for the result. The members' first calls meet, then their second
// ones, and so on.
//
//   Meeting<Tensors> meeting(/*members=*/4, /*awake=*/30us, add_up);
//   auto number = meeting.bring(member, tensors);      // each member
//   meeting.wait(number, deadline);
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "penstock/transport/gate.h"

namespace penstock::internal {

template <class Contribution>
class Meeting {
 public:
  // What the last to come does with all contributions, in the order of members.
  using Act = std::function<void(std::vector<Contribution>&)>;

  Meeting(std::size_t members, Clock::duration awake, Act act)
      : gate_(awake), calls_(members, 0), act_(std::move(act)) {}

  // The number of the meeting, to wait for. What was contributed belongs to the meeting until then.
  std::uint64_t bring(std::size_t member, Contribution contribution) {
    Gate::Lock lock = gate_.lock();
    const std::uint64_t number = calls_[member]++;
    Round& round = rounds_[number];
    round.contributions.resize(calls_.size());
    round.contributions[member] = std::move(contribution);
    if (++round.come < calls_.size()) return number;
    std::vector<Contribution> all = std::move(round.contributions);
    lock.unlock();
    std::exception_ptr error;
    try {
      act_(all);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    round.done = true;
    round.error = error;
    gate_.changed();
    return number;
  }

  // Throws what the act has thrown. Each member waits for each of its meetings once.
  Waited wait(std::uint64_t number, Deadline deadline) {
    Gate::Lock lock = gate_.lock();
    Round& round = rounds_[number];
    const Waited waited = gate_.wait(lock, deadline, [&] { return round.done; });
    if (waited != Waited::Ready) return waited;
    const std::exception_ptr error = round.error;
    if (++round.gone == calls_.size()) rounds_.erase(number);
    if (error) std::rethrow_exception(error);
    return waited;
  }

  void close() { gate_.close(); }

 private:
  struct Round {
    std::vector<Contribution> contributions;
    std::size_t come = 0;
    std::size_t gone = 0;
    bool done = false;
    std::exception_ptr error;
  };

  Gate gate_;
  std::vector<std::uint64_t> calls_;
  std::map<std::uint64_t, Round> rounds_;
  Act act_;
};

}  // namespace penstock::internal
