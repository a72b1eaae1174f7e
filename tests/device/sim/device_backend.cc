// Creates ordered backends for programs that load the library with dlopen. The second source that includes
// ProcessGroupGloo, besides penstock/transport/gloo.cc: the library does not link Penstock, which the program has.
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "tests/device/sim/ordered_backend.h"

namespace penstock::sim {
namespace {

constexpr auto kConnectTime = std::chrono::seconds(60);

std::mutex factory_mutex;
InnerBackends& factory() {
  static auto* const instance = new InnerBackends;
  return *instance;
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  // All groups of the process share a device, and with it a thread and a port.
  static const auto* const device = new auto(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto options = c10d::ProcessGroupGloo::Options::create(kConnectTime);
  options->devices = {*device};
  options->threads = 1;
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  // A rank that closes its connections while others still connect would look like one that has crashed.
  if (store->add("connected", 1) == size) store->set("all_connected", std::vector<std::uint8_t>{1});
  store->wait({"all_connected"}, kConnectTime);
  return c10::static_intrusive_pointer_cast<c10d::Backend>(std::move(group));
}

}  // namespace

void set_inner_backends(InnerBackends created) {
  const std::lock_guard lock(factory_mutex);
  factory() = std::move(created);
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               c10::Device device) {
  InnerBackends create;
  {
    const std::lock_guard lock(factory_mutex);
    create = factory() ? factory() : make_gloo;
  }
  return make_ordered_backend(create(store, rank, size), device);
}

}  // namespace penstock::sim

c10d::Backend* penstock_device_backend(c10d::Store* store, int rank, int size, int device_index) {
  const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_index));
  auto backend = penstock::sim::make_backend(c10::intrusive_ptr<c10d::Store>::reclaim_copy(store), rank, size, device);
  backend->eagerConnectSingleDevice(device);
  return backend.release();
}

void penstock_device_id(int device_index, std::string& id) {
  id = std::to_string(device_index);
}
