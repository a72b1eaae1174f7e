// Gloo, c10d's way between CPUs. Only gloo.cc sees ProcessGroupGloo itself; everybody else has a c10d::Backend.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>

#include "penstock/base/deadline.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock {

// Makes a group of `size` ranks that find one another through the store. Returns when all of them have come.
using BackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;

struct GlooOptions {
  // Where this rank listens for the others: an interface such as "eth0", or else a name or number of this machine.
  // Nothing but loopback unless one is named.
  std::string interface = {};
  std::string address = {};
  // Time that the ranks of a group have to connect to one another.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

// The groups that one factory makes have one thread in common that moves their data. Its port takes connections only while
// one of them is made. Children that this process forks do not keep the connections open. SIGPIPE is ignored from now on,
// unless the process has a handler for it. Throws std::runtime_error when there is no such interface or address, or when
// too few descriptors are left.
BackendFactory gloo_backends(const GlooOptions& options = {});

}  // namespace penstock
