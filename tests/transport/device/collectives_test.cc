// Collectives of process ranks whose tensors are on devices.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/tensor/values.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

class EveryDeviceGroup : public ::testing::TestWithParam<DeviceCarrier> {
 protected:
  // Calls act(group, device) for groups of all ranks, in both orders of members, on 2 and on 4 ranks.
  void for_each_group(const std::function<void(Group&, at::Device)>& act) const {
    for (const int ranks : {2, 4}) {
      World world(Carrier::Gloo, ranks, options_of(GetParam()));
      world.run([&](Transport& transport) {
        const at::Device device = sim_device(transport.rank());
        const RankScope scope(device);
        std::vector<int> members(static_cast<std::size_t>(ranks));
        for (int i = 0; i < ranks; ++i) members[static_cast<std::size_t>(i)] = i;
        for (int direction = 0; direction < 2; ++direction) {
          const auto group = transport.group(members, {device});
          act(*group, device);
          // No member leaves before all have completed.
          group->barrier()->wait(far());
          std::ranges::reverse(members);
        }
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EveryDeviceGroup, ::testing::Values(DeviceCarrier::Staged, DeviceCarrier::Direct),
                         [](const auto& carrier) { return name_of(carrier.param); });

// Returns what a member contributes. The sums of these numbers depend on the order.
at::Tensor contribution_of(at::IntArrayRef shape, at::ScalarType dtype, int member) {
  return (at::arange(c10::multiply_integers(shape), at::kFloat) % 50 + 0.1).pow(member + 1.3).view(shape).to(dtype);
}
at::Tensor sum(at::IntArrayRef shape, at::ScalarType dtype, int members) {
  at::Tensor all = contribution_of(shape, dtype, 0);
  for (int member = 1; member < members; ++member) all = all + contribution_of(shape, dtype, member);
  return all;
}

// Small and large tensors, and one without elements.
const std::vector<std::vector<std::int64_t>> kShapes = {{3}, {2, 5}, {}, {0, 3}, {300, 257}, {1}};

TEST_P(EveryDeviceGroup, SumsTensorsInTheOrderOfMembers) {
  for_each_group([](Group& group, at::Device device) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kLong}) {
      std::vector<at::Tensor> tensors;
      for (const auto& shape : kShapes) tensors.push_back(contribution_of(shape, dtype, group.member()).to(device));
      group.all_reduce(tensors)->wait(far());
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        // The backends choose the order in which they sum large tensors.
        const at::Tensor expected = sum(kShapes[i], dtype, group.size());
        if (expected.nbytes() > 65536) {
          EXPECT_TRUE(at::allclose(expected, tensors[i].cpu()));
        } else {
          EXPECT_TRUE(at::equal(expected, tensors[i].cpu())) << c10::toString(dtype);
        }
      }
    }
  });
}

TEST_P(EveryDeviceGroup, SumsTensorsOfTheCpuToo) {
  for_each_group([](Group& group, at::Device device) {
    for (int round = 0; round < 3; ++round) {
      const at::Tensor on_host = contribution_of({4}, at::kFloat, group.member());
      const at::Tensor on_device = contribution_of({40, 6}, at::kDouble, group.member()).to(device).t();
      group.all_reduce({on_host, on_device})->wait(far());
      EXPECT_TRUE(at::equal(sum({4}, at::kFloat, group.size()), on_host));
      EXPECT_TRUE(at::equal(sum({40, 6}, at::kDouble, group.size()).t(), on_device.cpu()));
    }
  });
}

TEST_P(EveryDeviceGroup, GathersAndScatters) {
  for_each_group([](Group& group, at::Device device) {
    for (const std::int64_t length : {1, 7, 0, 30000}) {
      std::vector<at::Tensor> parts;
      for (int member = 0; member < group.size(); ++member)
        parts.push_back(contribution_of({length}, at::kFloat, member));
      const at::Tensor whole = at::empty({length * group.size()}, device);
      const at::Tensor own = parts[static_cast<std::size_t>(group.member())].to(device);
      group.all_gather(whole, own)->wait(far());
      EXPECT_TRUE(at::equal(at::cat(parts), whole.cpu()));

      const std::vector<std::int64_t> shape{group.size(), length};
      const at::Tensor part = at::empty({length}, device);
      group.reduce_scatter(part, contribution_of(shape, at::kFloat, group.member()).to(device))->wait(far());
      EXPECT_TRUE(at::allclose(sum(shape, at::kFloat, group.size())[group.member()], part.cpu()));
    }
  });
}

TEST_P(EveryDeviceGroup, BroadcastsTheTensorsOfTheRoot) {
  for_each_group([](Group& group, at::Device device) {
    for (int root = 0; root < group.size(); ++root) {
      const auto tensors_of = [](int member) {
        return std::vector<at::Tensor>{
            contribution_of({3, 4}, at::kFloat, member), contribution_of({6, 3}, at::kDouble, member).t(),
            contribution_of({0}, at::kFloat, member), contribution_of({300, 300}, at::kBFloat16, member)};
      };
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : tensors_of(group.member())) tensors.push_back(tensor.to(device));
      tensors.push_back(at::full({2}, group.member()));
      group.broadcast(tensors, root)->wait(far());
      const std::vector<at::Tensor> expected = tensors_of(root);
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], tensors[i].cpu())) << i;
      EXPECT_TRUE(at::equal(at::full({2}, root), tensors.back()));
    }
  });
}

TEST_P(EveryDeviceGroup, RunsSeveralCollectivesAtOnce) {
  for_each_group([](Group& group, at::Device device) {
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Work>> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(contribution_of({100 * i + 1, 60}, at::kLong, group.member()).to(device));
      works.push_back(group.all_reduce({tensors.back()}));
    }
    for (std::size_t i = works.size(); i-- > 0;) works[i]->wait(far());
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(
          at::equal(sum({100 * i + 1, 60}, at::kLong, group.size()), tensors[static_cast<std::size_t>(i)].cpu()));
    }
  });
}

TEST_P(EveryDeviceGroup, NeverWaitsForADevice) {
  const std::uint64_t before = sim::counters().host_waits;
  for_each_group([](Group& group, at::Device device) {
    for (int i = 0; i < 4; ++i) {
      const at::Tensor tensor = at::ones({100 + 50000 * (i % 2)}, device) * 2;
      group.all_reduce({tensor, at::ones({1})})->wait(far());
      group.broadcast({tensor + 1}, 0)->wait(far());
    }
  });
  EXPECT_EQ(sim::counters().host_waits, before);
}

TEST(DirectGroup, ReducesInCpuMemoryIfAMemberHasNoDevice) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  world.run([](Transport& transport) {
    const at::Device device = transport.rank() == 0 ? at::Device(at::kCPU) : sim_device(0);
    const auto group = transport.group({0, 1}, {device});
    const at::Tensor tensor = at::full({5}, 1.0 + transport.rank(), device);
    group->all_reduce({tensor})->wait(far());
    EXPECT_TRUE(at::equal(at::full({5}, 3.0), tensor.cpu()));
  });
}

TEST(DirectGroup, TimesOutWhenAMemberIsMissing) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  std::vector<std::shared_ptr<Group>> groups(2);
  world.run([&](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    const auto group = groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1}, {device});
    if (transport.rank() == 1) return;
    group->all_reduce({at::ones({5}, device)})->wait(Clock::now() + std::chrono::milliseconds(200));
    Thrown found;
    while (!found.threw) {
      found = thrown_by([&] { transport.post_receive(1, {}, device); });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(found, timeout(TransportError::kNoPeer, "not all ranks of a group have arrived within the deadline"));
  });
}

// The member's device has not computed what it contributes, so its thread has not started the collective.
TEST(StagedGroup, EndsWaitsWhenARankAborts) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Staged));
  StreamGate gate;
  std::atomic<bool> is_waiting = false;
  world.run([&](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    const auto group = transport.group({0, 1}, {device});
    if (transport.rank() == 1) {
      while (!is_waiting) std::this_thread::yield();
      transport.abort("stage 3 is out of memory");
      return;
    }
    gate.close(device);
    const auto work = group->all_reduce({at::ones({5}, device)});
    is_waiting = true;
    EXPECT_EQ(thrown_by([&] { work->wait(far()); }), aborted("stage 3 is out of memory"));
    gate.open();
  });
}

TEST(DirectGroup, OutlivesItsTransport) {
  std::vector<std::shared_ptr<Group>> groups(2);
  {
    World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
    world.run([&](Transport& transport) {
      groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1}, {sim_device(transport.rank())});
    });
  }
  EXPECT_EQ(thrown_by([&] { groups[0]->all_reduce({at::ones({2}, sim_device(0))})->wait(far()); }),
            aborted("this rank has left"));
}

}  // namespace
}  // namespace penstock::internal::testing
