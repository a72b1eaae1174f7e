// A plugin for the tests of device_backend.h, whose function reports its arguments as an error. It has four devices.
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/nccl_plugin.h"

namespace {

c10d::Backend* report(c10d::Store* store, int rank, int size, int device_index) {
  throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(size) + " on device " +
                           std::to_string(device_index) + ", with " + std::to_string(store->add("key", 0)) +
                           " in the store");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) c10d::Backend* penstock_device_backend(c10d::Store* store, int rank,
                                                                                         int size, int device_index) {
  return report(store, rank, size, device_index);
}

extern "C" __attribute__((visibility("default"))) void penstock_device_id(int device_index, std::string& id) {
  if (device_index >= 4) throw std::runtime_error("there is no device " + std::to_string(device_index));
  id = "slot " + std::to_string(device_index);
}
