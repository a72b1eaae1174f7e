// Worlds of process ranks with tensors on the simulated device. Each rank runs on a thread of the test and has a device
// of its own; their messages are staged in CPU memory, or sent from device to device.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/device_backend.h"
#include "tests/device/sim/ordered_backend.h"
#include "tests/device/sim/sim_device.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {

// The two ways of device tensors between process ranks.
enum class DeviceCarrier { Staged, Direct };

inline std::string name_of(DeviceCarrier carrier) {
  return carrier == DeviceCarrier::Staged ? "staged" : "direct";
}

inline at::Device sim_device(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

// Returns backends for any device, without an id: the ranks of some tests share devices.
inline DeviceBackends sim_backends() {
  return {.create = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device device) {
    return c10::intrusive_ptr<c10d::Backend>::reclaim(penstock_device_backend(store.get(), rank, size, device.index()));
  }};
}

inline C10dOptions options_of(DeviceCarrier carrier, C10dOptions options = {}) {
  if (carrier == DeviceCarrier::Direct) options.device_backends = sim_backends();
  return options;
}

// Installs the simulated devices before the first test, and fails each test that has a race.
class Simulation : public ::testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const ::testing::UnitTest& /*unit_test*/) override {
    // The race detector looks at the order of calls, so that it needs no long delays.
    sim::install({.devices = 4, .max_delay_us = 20});
  }
  void OnTestEnd(const ::testing::TestInfo& /*info*/) override {
    for (const std::string& race : sim::take_races()) ADD_FAILURE() << race;
  }
};

// The streams in which a rank computes, as in a pipeline.
struct RankScope {
  explicit RankScope(at::Device device) : streams({device}), scope(streams) {}
  RankStreams streams;
  RankStreams::Scope scope;
};

// Keeps a stream from continuing until it is opened.
class StreamGate {
 public:
  // Closes the calling thread's current stream of the device.
  void close(at::Device device) {
    sim::launch(current_stream(device), "gate", {}, [state = state_] {
      while (!*state) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  void open() { *state_ = true; }
  ~StreamGate() { open(); }

 private:
  std::shared_ptr<std::atomic<bool>> state_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace penstock::internal::testing
