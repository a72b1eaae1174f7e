// The handshake of process ranks. Each rank publishes a value in the store and waits for the values of all others, so
// that missing ranks can be named. A process of another job, which has another token, and a rank with other options are
// refused before anything else is sent.
//
// All published values are signed with the job token. At the end each rank signs a transcript of all values, which
// contains a nonce of every rank, so that an attacker cannot replay values of an earlier run.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/transport/job_token.h"
#include "penstock/transport/rank_options.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal {

// One rank's part in the handshake.
struct Membership {
  int rank = 0;
  int ranks = 1;
  JobToken token = JobToken();
  // Options that must be the same on all ranks.
  RankOptions agreed = {};
  // Text that all ranks receive, and a function that receives those of all ranks, by rank, before the handshake ends.
  // If it throws TransportError, the handshake fails on all ranks.
  std::string statement = {};
  std::function<void(const std::vector<std::string>& statements)> on_statements = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  WaitingFunction on_waiting = {};
};

// Blocks until all ranks have called it on this store. Returns a part of the store for these ranks alone, whose values
// are signed. Ranks may call it several times, all equally often.
//
// Throws TransportError with the same message on all ranks that have called it: Timeout if ranks are missing at the
// timeout, with the first of them as peer; Aborted if a rank has other options than rank 0 or cannot prove that it
// knows the token, with that rank as peer; what on_statements throws. Throws Aborted at once on a rank whose token is not that of rank 0; the
// others continue to wait.
c10::intrusive_ptr<c10d::Store> require_all_ranks(const c10::intrusive_ptr<c10d::Store>& store, const Membership& self);

// Returns a text such as "5 s" or "0.25 s".
std::string seconds_text(std::chrono::milliseconds time);

// Reports the progress of a wait to a WaitingFunction: first after a while, and then from time to time.
class WaitingLines {
 public:
  WaitingLines(WaitingFunction on_waiting, std::chrono::milliseconds timeout);
  // Passes on "`what` (3 s of 60 s)" if a report is due.
  void waiting(const std::function<std::string()>& what);

 private:
  WaitingFunction on_waiting_;
  std::chrono::milliseconds timeout_;
  Deadline began_;
  Deadline next_;
};

}  // namespace penstock::internal
