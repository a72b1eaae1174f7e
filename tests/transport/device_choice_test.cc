// The choice between Direct and Staged that process ranks make when they connect. No backend is created here, so these
// tests need no devices.
#include "penstock/transport/device_choice.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "penstock/transport/c10d.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

DeviceBackends possible(const std::string& device_id) {
  return {.create =
              [](const c10::intrusive_ptr<c10d::Store>&, int, int, at::Device) {
                ADD_FAILURE() << "a backend was created without a message";
                return c10::intrusive_ptr<c10d::Backend>();
              },
          .device_id = device_id};
}
DeviceBackends impossible(const std::string& reason) {
  return {.reason = reason};
}

// Results of a rank that connects.
struct Found {
  Thrown thrown;
  int calls = 0;
  DeviceTransport chosen = DeviceTransport::Auto;
  std::string reason;
  bool sends_directly = false;
};

// Connects a rank for each value, each on a thread of its own.
std::vector<Found> connect(const std::vector<DeviceBackends>& backends, const std::vector<DeviceTransport>& asked) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int ranks = static_cast<int>(backends.size());
  std::vector<Found> all(backends.size());
  on_threads(ranks, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Found& found = all[index];
    found.thrown = thrown_by([&] {
      const auto transport =
          c10d_transport(store, rank, ranks,
                         {.device_backends = backends[index],
                          .device_transport = asked[index],
                          .on_device_transport = [&](DeviceTransport chosen, const std::string& why) {
                            ++found.calls;
                            found.chosen = chosen;
                            found.reason = why;
                          }});
      found.sends_directly = transport->needs_order();
    });
  });
  return all;
}
std::vector<Found> connect(const std::vector<DeviceBackends>& backends, DeviceTransport asked) {
  return connect(backends, std::vector(backends.size(), asked));
}

void expect_chosen(const std::vector<Found>& all, DeviceTransport chosen, const std::string& reason) {
  for (const Found& found : all) {
    EXPECT_EQ(found.thrown, Thrown());
    EXPECT_EQ(found.calls, 1);
    EXPECT_EQ(found.chosen, chosen);
    EXPECT_EQ(found.reason, reason);
    EXPECT_EQ(found.sends_directly, chosen == DeviceTransport::Direct);
  }
}

void expect_refused(const std::vector<Found>& all, const std::string& message) {
  for (const Found& found : all) {
    EXPECT_EQ(
        found.thrown,
        (Thrown{.threw = true, .why = TransportError::Why::Aborted, .peer = TransportError::kNoPeer, .what = message}));
    EXPECT_EQ(found.calls, 0);
  }
}

constexpr const char* kShared =
    "ranks 1 and 2 have the same device.\n"
    "  Hint: give each rank a device of its own, or stage tensors in CPU memory.";

TEST(DeviceChoice, TakesDirectIfAllRanksCanAndHaveDevicesOfTheirOwn) {
  for (const DeviceTransport asked : {DeviceTransport::Auto, DeviceTransport::Direct}) {
    expect_chosen(connect({possible("a/0"), possible("a/1"), possible("b/0")}, asked), DeviceTransport::Direct, "");
  }
}

TEST(DeviceChoice, DoesNotCompareDevicesWithoutAnId) {
  expect_chosen(connect({possible(""), possible("")}, DeviceTransport::Direct), DeviceTransport::Direct, "");
}

TEST(DeviceChoice, TakesStagedOnAllRanksIfOneCannot) {
  expect_chosen(connect({possible("a/0"), impossible("no plugin.\n  Hint: build it.")}, DeviceTransport::Auto),
                DeviceTransport::Staged, "rank 1: no plugin.\n  Hint: build it.");
}

TEST(DeviceChoice, TakesStagedIfRanksShareADevice) {
  expect_chosen(connect({possible("a/0"), possible("a/1"), possible("a/1")}, DeviceTransport::Auto),
                DeviceTransport::Staged, kShared);
}

TEST(DeviceChoice, TakesStagedIfItIsAskedFor) {
  expect_chosen(connect({possible("a/0"), possible("a/1")}, DeviceTransport::Staged), DeviceTransport::Staged, "");
}

TEST(DeviceChoice, TakesStagedIfARankHasNoBackends) {
  expect_chosen(connect({possible("a/0"), {}}, DeviceTransport::Auto), DeviceTransport::Staged,
                "rank 1: no device backends were given.\n  Hint: pass those of device_backends() on all ranks.");
}

TEST(DeviceChoice, RefusesDirectOnAllRanksIfOneCannot) {
  expect_refused(connect({impossible("no plugin.\n  Hint: build it."), possible("a/1")}, DeviceTransport::Direct),
                 "tensors cannot be sent from device to device: rank 0: no plugin.\n  Hint: build it.");
}

TEST(DeviceChoice, RefusesDirectBetweenRanksThatShareADevice) {
  expect_refused(connect({possible("a/0"), possible("a/1"), possible("a/1")}, DeviceTransport::Direct),
                 std::string("tensors cannot be sent from device to device: ") + kShared);
}

TEST(DeviceChoice, RefusesRanksThatAskForDifferentTransports) {
  const std::vector<Found> all = connect({possible("a/0"), possible("a/1"), possible("a/2")},
                                         {DeviceTransport::Direct, DeviceTransport::Staged, DeviceTransport::Auto});
  for (const Found& found : all) {
    EXPECT_EQ(found.thrown.what,
              "the ranks have different options.\n"
              "  device_transport: staged on rank 1, direct on rank 0\n"
              "  device_transport: not given on rank 2, direct on rank 0\n"
              "  Hint: start all ranks with the same command line and configuration file.");
  }
}

}  // namespace
}  // namespace penstock::internal::testing
