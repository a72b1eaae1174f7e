// The first thing that the ranks of a transport do: each publishes itself in the store, and waits there until all others
// have done so. A rank that is missing is known by its number, and ranks that were started with different options end
// before anything else is sent.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/rank_options.h"

namespace penstock {

// Receives a line of text from time to time while ranks are waited for.
using WaitingFunction = std::function<void(const std::string& line)>;

struct Membership {
  int rank = 0;
  int ranks = 1;
  // Options that must be the same on all ranks.
  RankOptions agreed = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  WaitingFunction on_waiting = {};
};

// Blocks until all ranks have called it on this store. Throws TransportError on all ranks that are there, with the same
// message: Late when ranks are missing at the timeout, whose peer is the first of them, and Aborted when a rank has other
// options than rank 0, whose peer is that rank. A store is used for one call of each rank.
void require_all_ranks(c10d::Store& store, const Membership& own);

// "5 s", "0.25 s"
std::string seconds_text(std::chrono::milliseconds time);

// Tells a WaitingFunction how long something has been waited for: not at once, and then from time to time.
class WaitingLines {
 public:
  WaitingLines(WaitingFunction on_waiting, std::chrono::milliseconds timeout);
  // Passes "`what` (3 s of 60 s)" on when it is time for it.
  void waiting(const std::function<std::string()>& what);

 private:
  WaitingFunction on_waiting_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace penstock
