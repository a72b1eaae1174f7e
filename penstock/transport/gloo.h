// Gloo, c10d's backend for CPUs. Only gloo.cc includes ProcessGroupGloo; all other code uses c10d::Backend.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock {

// Creates the backend of a group of `size` ranks, which find each other through the store. Blocks until all have
// connected.
using BackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;

struct GlooOptions {
  // Interface that this rank listens on, such as "eth0". If empty, it listens on `address`, a host name or IP address
  // of this machine. If both are empty, it listens on loopback.
  std::string interface = {};
  std::string address = {};
  // Time that the ranks of a group have to connect to each other.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

// Returns a factory of Gloo backends. The backends of one factory share a thread that transfers their data, and a port
// that accepts connections only while one of them is created. Children that this process forks do not inherit the
// connections. Ignores SIGPIPE from now on, unless the process has a handler for it. Throws std::runtime_error if the
// interface or address does not exist, or if too few descriptors are left.
BackendFactory gloo_backends(const GlooOptions& options = {});

}  // namespace penstock
