// Checks that the processes of a run make before its first step: if one fails, all fail, and all have the same options.
// With a null transport there is one process, and the checks are local.
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

// Thrown when ranks have different options, which the message lists, or when another rank has failed, with its message.
class AgreementError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Agreement {
 public:
  // All processes construct one and call the same members in the same order. The transport outlives this.
  Agreement(Transport* transport, std::chrono::milliseconds timeout);

  // Calls `act` on every process. If it throws on some, all processes throw: those rethrow their own exception, the
  // others throw AgreementError with the message of the lowest rank that failed. Throws TransportError.
  void fail_together(const std::function<void()>& act) const;

  // Throws AgreementError on all processes unless all have the same options. It lists the differences from rank 0.
  void require_same_options(const RankOptions& options) const;

 private:
  // Returns the texts of all ranks, indexed by rank.
  std::vector<std::string> gather(const std::string& text) const;

  // All processes; null if there is one.
  std::shared_ptr<Group> everyone_;
  std::chrono::milliseconds timeout_;
};

}  // namespace penstock::internal
