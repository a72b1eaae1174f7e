// The first thing that the ranks of a transport do: each publishes itself in the store, and waits there until all others
// have done so. A rank that is missing is known by its number. A process of another job, which has another token, and a
// rank with other options end before anything else is sent.
//
// All values that ranks publish are signed with the job token. At the end each rank signs what all have published, with
// a random number of every rank in it, so that values of an earlier run are of no use to a stranger.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/job_token.h"
#include "penstock/transport/rank_options.h"

namespace penstock::internal {

// Receives a line of text from time to time while ranks are waited for.
using WaitingFunction = std::function<void(const std::string& line)>;

struct Membership {
  int rank = 0;
  int ranks = 1;
  JobToken token = JobToken();
  // Options that must be the same on all ranks.
  RankOptions agreed = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  WaitingFunction on_waiting = {};
};

// Blocks until all ranks have called it on this store. Returns a part of the store that belongs to these ranks alone and
// whose values are signed. Ranks may call it several times, all equally often.
//
// Throws TransportError on all ranks that are there, with the same message: Late when ranks are missing at the timeout,
// whose peer is the first of them, and Aborted when a rank has other options than rank 0 or cannot prove that it knows the
// token, whose peer is that rank. Throws Aborted at once on a rank whose token is not that of rank 0; the others go on to
// wait for the right one.
c10::intrusive_ptr<c10d::Store> require_all_ranks(const c10::intrusive_ptr<c10d::Store>& store, const Membership& own);

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

}  // namespace penstock::internal
