// The network interface that NCCL listens on. Its default is any interface but loopback, also for ranks of one machine.
#pragma once

#include <string>

namespace penstock::internal {

// Returns the value of NCCL_SOCKET_IFNAME for the interface that Gloo listens on: `interface` if it is not empty, or the
// one with this address. Returns an empty text if no interface has it.
std::string nccl_interface(const std::string& interface, const std::string& address);

// Sets NCCL_SOCKET_IFNAME to this value unless the variable is set. NCCL reads it when the first backend is created.
void restrict_nccl(const std::string& interface, const std::string& address);

}  // namespace penstock::internal
