// The only source that includes ProcessGroupGloo, and the stand-ins for gloo's headers in gloo_headers.
#include "penstock/transport/gloo.h"

#include <net/if.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/base/mutex.h"
#include "penstock/transport/child_sockets.h"
#include "penstock/transport/connection_filter.h"
#include "penstock/transport/sockets.h"

namespace penstock {
namespace {

using Device = std::shared_ptr<::gloo::transport::Device>;

Device device_of(const GlooOptions& options) {
  const std::string address = options.address.empty() ? "127.0.0.1" : options.address;
  try {
    if (options.interface.empty()) return c10d::ProcessGroupGloo::createDeviceForHostname(address);
    // Gloo leaks memory if the interface does not exist.
    if (if_nametoindex(options.interface.c_str()) != 0) {
      return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
    }
  } catch (const std::system_error& error) {
    // Most likely Gloo's thread cannot be started.
    throw std::runtime_error("Gloo cannot start: " + error.code().message() +
                             ".\n  Hint: `ulimit -u N` allows more threads and processes.");
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): reported below
  }
  const std::string what = options.interface.empty() ? "address '" + address : "interface '" + options.interface;
  throw std::runtime_error("Gloo cannot listen on the " + what +
                           "'.\n  Hint: name one that this machine has; `ip address` lists them.");
}

// Gloo writes to connections that may be broken, which would end the process with SIGPIPE.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0) return;
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace

BackendFactory gloo_backends(const GlooOptions& options) {
  ignore_broken_pipes();
  // A device uses a listening socket and a few descriptors to poll it.
  constexpr int kDeviceDescriptors = 8;
  internal::require_descriptors(kDeviceDescriptors);
  // Serialises the creation of devices, so that NewSockets finds only the sockets of this one.
  static internal::Mutex mutex;
  const internal::MutexLock lock(mutex);
  const internal::NewSockets listening;
  const Device device = device_of(options);
  listening.close_in_children();
  const auto filter = std::make_shared<internal::ConnectionFilter>(listening.listening());
  const std::chrono::milliseconds timeout = bounded(options.timeout);
  return [device, filter, timeout](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
    const auto gloo = c10d::ProcessGroupGloo::Options::create(timeout);
    gloo->devices = {device};
    // Collectives of a group run one after the other.
    gloo->threads = 1;
    // Gloo may use two descriptors for one connection while two ranks connect.
    internal::require_descriptors(2 * size);
    const internal::ConnectionFilter::Opening opening(*filter);
    const internal::NewSockets connections;
    auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo);
    connections.close_in_children();
    // Wait until all ranks have connected: a rank that closes its connections while others still connect would look
    // like one that has crashed.
    if (store->add("connected", 1) == size) store->set("all_connected", std::vector<std::uint8_t>{1});
    store->wait({"all_connected"}, timeout);
    return c10::static_intrusive_pointer_cast<c10d::Backend>(std::move(group));
  };
}

}  // namespace penstock
