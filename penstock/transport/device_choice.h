// The choice of how tensors on devices are sent between process ranks. Each rank makes a statement of what is possible
// for it, and all ranks choose alike from the statements of all.
#pragma once

#include <string>
#include <vector>

#include "penstock/transport/device_backend.h"

namespace penstock::internal {

class DeviceChoice {
 public:
  DeviceChoice(const DeviceBackends& backends, DeviceTransport asked);

  // Returns the name of the transport that was asked for, which all ranks have to agree on; empty for Auto.
  std::string asked() const;
  // Returns the statement of this rank.
  const std::string& statement() const { return statement_; }
  // Chooses from the statements of all ranks. Throws TransportError (Aborted) if Direct was asked for and is impossible.
  void choose(const std::vector<std::string>& statements);

  // Returns Direct or Staged. Requires choose().
  DeviceTransport chosen() const { return chosen_; }
  // Explains why Auto has not chosen Direct; empty in all other cases.
  const std::string& reason() const { return reason_; }

 private:
  std::string statement_;
  DeviceTransport asked_;
  DeviceTransport chosen_ = DeviceTransport::Staged;
  std::string reason_;
};

}  // namespace penstock::internal
