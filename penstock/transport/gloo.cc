// The only source that sees ProcessGroupGloo, and the stand-ins for gloo's headers.
#include "penstock/transport/gloo.h"

#include <net/if.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

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
    // Gloo loses memory when there is no such interface.
    if (if_nametoindex(options.interface.c_str()) != 0) {
      return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
    }
  } catch (const std::system_error& error) {
    // Its thread, most likely.
    throw std::runtime_error("Gloo cannot start: " + error.code().message() +
                             ".\n  Hint: `ulimit -u N` allows more threads and processes.");
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): said below, in our words
  }
  const std::string what = options.interface.empty() ? "address '" + address : "interface '" + options.interface;
  throw std::runtime_error("Gloo cannot listen on the " + what +
                           "'.\n  Hint: name one that this machine has; `ip address` lists them.");
}

// Gloo writes to connections that may be broken, and the signal for that would end the process.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (::sigaction(SIGPIPE, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  now.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &now, nullptr);
}

}  // namespace

BackendFactory gloo_backends(const GlooOptions& options) {
  ignore_broken_pipes();
  // A device has a listening socket and a few descriptors that watch it.
  constexpr int kOfDevice = 8;
  internal::require_descriptors(kOfDevice);
  // The sockets of devices that are made at the same time are told apart.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const internal::NewSockets listening;
  const Device device = device_of(options);
  listening.close_in_children();
  const auto filter = std::make_shared<internal::ConnectionFilter>(listening.listening());
  const std::chrono::milliseconds timeout = bounded(options.timeout);
  return [device, filter, timeout](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
    const auto gloo = c10d::ProcessGroupGloo::Options::create(timeout);
    gloo->devices = {device};
    // Threads for collectives, which run one after the other.
    gloo->threads = 1;
    // While two ranks connect, there may be two descriptors for one connection.
    internal::require_descriptors(2 * size);
    const internal::ConnectionFilter::Opening opening(*filter);
    const internal::NewSockets connections;
    auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo);
    connections.close_in_children();
    // A rank that has connected may close its connections at once, which another that still connects takes for a crash:
    // all wait until the last has connected.
    if (store->add("connected", 1) == size) store->set("all_connected", std::vector<std::uint8_t>{1});
    store->wait({"all_connected"}, timeout);
    return c10::static_intrusive_pointer_cast<c10d::Backend>(std::move(group));
  };
}

}  // namespace penstock
