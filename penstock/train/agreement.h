// Agreement between the processes of a run before its first step: they fail together, and they have the same options.
// With a null transport there is one process, which agrees with itself.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/transport/rank_options.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// The message names the ranks and what differs, or what another rank has failed with.
class AgreementError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Agreement {
 public:
  // All processes make one, and call the same in the same order.
  Agreement(Transport* transport, std::chrono::milliseconds timeout);

  // Calls `act` on every process. If it throws on one, it throws on all: there what `act` threw, elsewhere AgreementError
  // with the message of the lowest rank that failed. Throws TransportError.
  void fail_together(const std::function<void()>& act) const;

  // Throws AgreementError on all processes unless all have the same options, with those that differ from rank 0's.
  void require_same_options(const RankOptions& options) const;

 private:
  // Returns the texts of all ranks, by rank.
  std::vector<std::string> gather(const std::string& text) const;

  // Null for one process.
  std::shared_ptr<Group> everyone_;
  std::chrono::milliseconds timeout_;
};

}  // namespace penstock::internal
