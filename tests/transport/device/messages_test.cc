// Messages between process ranks whose tensors are on devices.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/tensor/values.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

struct DeviceWorldCase {
  DeviceCarrier carrier;
  int ranks;
};

int next_of(const Transport& transport) {
  return (transport.rank() + 1) % transport.ranks();
}
int previous_of(const Transport& transport) {
  return (transport.rank() + transport.ranks() - 1) % transport.ranks();
}

// Returns the order of messages of a ring in which each rank sends the even channels to the next one, and the odd ones
// to the previous one.
std::shared_ptr<const MessageOrder> ring_order(const Transport& transport, const std::vector<Tag>& tags) {
  auto order = std::make_shared<MessageOrder>();
  const auto device = [](int rank) { return sim_device(rank); };
  const int own = transport.rank();
  for (const Tag tag : tags) {
    const bool forwards = tag.channel % 2 == 0;
    const int to = forwards ? next_of(transport) : previous_of(transport);
    const int from = forwards ? previous_of(transport) : next_of(transport);
    order->sent[to].push_back({tag, device(own), device(to)});
    order->received[from].push_back({tag, device(from), device(own)});
  }
  return order;
}
std::vector<Tag> numbered(std::uint32_t channel, std::uint32_t count) {
  std::vector<Tag> tags;
  for (std::uint32_t i = 0; i < count; ++i) tags.push_back({.channel = channel, .number = i});
  return tags;
}

// Compares everything but the strides of tensors with gaps. The found tensors should be on the device.
::testing::AssertionResult same_message(const Message& expected, const Message& found, at::Device device) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure() << found.size() << " tensors, expected " << expected.size();
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& sent = expected[i];
    const at::Tensor& received = found[i];
    if (sent.defined() != received.defined()) return ::testing::AssertionFailure() << "tensor " << i << " is None";
    if (!sent.defined()) continue;
    const bool same = sent.scalar_type() == received.scalar_type() && sent.sizes() == received.sizes() &&
                      sent.requires_grad() == received.requires_grad() && received.device() == device &&
                      (!sent.is_non_overlapping_and_dense() || sent.strides() == received.strides()) &&
                      at::equal(sent.detach().cpu(), received.detach().cpu());
    if (same) continue;
    return ::testing::AssertionFailure() << "tensor " << i << "\nexpected: " << text(sent.detach().cpu())
                                         << "\nfound:    " << text(received.detach().cpu());
  }
  return ::testing::AssertionSuccess();
}

struct Payload {
  const char* name;
  Message message;
};
// Returns messages of all kinds. Their shapes depend on `size`.
std::vector<Payload> payloads(std::int64_t size, at::Device device) {
  const auto on = [device](const at::Tensor& tensor) { return tensor.to(device); };
  std::vector<Payload> all{
      {"one", {on(counting({size, 3}))}},
      {"nothing at all", {}},
      {"None", {at::Tensor()}},
      {"None among others", {at::Tensor(), on(counting({size})), at::Tensor(), on(counting({2, size})), at::Tensor()}},
      {"a scalar", {on(at::full({}, static_cast<double>(size)))}},
      {"no elements", {on(at::zeros({0, size})), on(at::zeros({size, 0}, at::kLong))}},
      {"no elements among others", {on(at::zeros({0, 4})), on(counting({size})), on(at::zeros({0}))}},
      {"transposed", {on(counting({size, 3})).t()}},
      {"channels last", {on(counting({2, 3, size, 5})).contiguous(at::MemoryFormat::ChannelsLast)}},
      {"with gaps", {on(counting({size, 6})).narrow(1, 1, 3)}},
      {"every second", {on(counting({2 * size})).slice(0, 0, 2 * size, 2)}},
      {"expanded", {on(counting({size, 1})).expand({size, 7})}},
      {"requires grad", {on(counting({size})).requires_grad_(), on(counting({size}))}},
      {"not a leaf", {on(counting({size})).requires_grad_() * 2}},
      {"four MiB", {on(counting({1024, 1024}))}},
  };
  const at::Tensor same = on(counting({size, 2}));
  all.push_back({"twice the same", {same, same}});
  std::vector<at::Tensor> many;
  for (int i = 0; i < 40; ++i) many.push_back(on(counting({i % 3 + 1, size, 2})));
  all.push_back({"forty", many});
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool}) {
    all.push_back({c10::toString(dtype), {on(counting({size, 2}).to(dtype))}});
  }
  return all;
}

class EveryDeviceWorld : public ::testing::TestWithParam<DeviceWorldCase> {
 protected:
  World world(const C10dOptions& options = {}) const {
    return {Carrier::Gloo, GetParam().ranks, options_of(GetParam().carrier, options)};
  }
};
std::vector<DeviceWorldCase> cases() {
  std::vector<DeviceWorldCase> all;
  for (const DeviceCarrier carrier : {DeviceCarrier::Staged, DeviceCarrier::Direct}) {
    for (int ranks = 2; ranks <= 4; ++ranks) all.push_back({carrier, ranks});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Device, EveryDeviceWorld, ::testing::ValuesIn(cases()), [](const auto& world) {
  return name_of(world.param.carrier) + "_" + std::to_string(world.param.ranks);
});

// Sends all payloads of some sizes around the ring, one size in each step.
void send_around(Transport& transport, const std::vector<std::int64_t>& sizes, bool only_first_rank_knows_sizes) {
  const at::Device device = sim_device(transport.rank());
  const RankScope scope(device);
  const auto count = static_cast<std::uint32_t>(payloads(1, device).size());
  std::vector<Tag> tags = numbered(2, count);
  for (const Tag tag : numbered(3, count)) tags.push_back(tag);
  const auto order = ring_order(transport, tags);
  for (const std::int64_t size : sizes) {
    SCOPED_TRACE(size);
    const bool knows = transport.rank() == 0 || !only_first_rank_knows_sizes;
    transport.set_order(order);
    transport.begin_step(knows ? static_cast<std::uint64_t>(size) : 0);
    const std::vector<Payload> all = payloads(size, device);
    // Each comparison waits for the device once only.
    const std::vector<Payload> expected = payloads(size, at::kCPU);
    for (const Tag tag : tags) {
      transport.post_receive(tag.channel == 2 ? previous_of(transport) : next_of(transport), tag, device);
    }
    const auto receive = [&](Tag tag) {
      const int from = tag.channel == 2 ? previous_of(transport) : next_of(transport);
      EXPECT_TRUE(same_message(expected[tag.number].message, transport.receive(from, tag, far()), device))
          << expected[tag.number].name;
    };
    // Where only the first rank knows the sizes, the others learn them before they send.
    for (const Tag tag : tags) {
      if (!knows) receive(tag);
      const int to = tag.channel == 2 ? next_of(transport) : previous_of(transport);
      transport.send(to, tag, all[tag.number].message, far());
    }
    for (const Tag tag : tags) {
      if (knows) receive(tag);
    }
    transport.end_step(far());
  }
}

TEST_P(EveryDeviceWorld, DeliversEveryMessageUnchangedInEveryStep) {
  world().run([](Transport& transport) { send_around(transport, {4, 4, 4}, false); });
}

TEST_P(EveryDeviceWorld, DeliversMessagesOfOtherSizesInTheNextStep) {
  world().run([](Transport& transport) { send_around(transport, {4, 6, 6, 2, 2}, false); });
}

TEST_P(EveryDeviceWorld, PropagatesSizesThatOnlyOneRankKnows) {
  if (GetParam().ranks > 2) return;
  world().run([](Transport& transport) { send_around(transport, {4, 4, 7, 7, 3}, true); });
}

TEST_P(EveryDeviceWorld, DeliversMessagesOfAnySizeWithDynamicShapes) {
  world({.dynamic_shapes = true}).run([](Transport& transport) { send_around(transport, {4, 6, 2}, false); });
}

// The sender's order is that of the numbers in `sent`.
TEST_P(EveryDeviceWorld, DeliversMessagesInTheOrderOfTheReceives) {
  world().run([](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    std::vector<Tag> sent;
    for (const std::uint32_t i : {3U, 1U, 0U, 7U, 6U, 2U, 5U, 4U}) sent.push_back({.channel = i % 2 * 2, .number = i});
    const auto order = ring_order(transport, sent);
    for (int step = 0; step < 4; ++step) {
      transport.set_order(order);
      transport.begin_step(1);
      for (const Tag tag : sent) transport.post_receive(previous_of(transport), tag, device);
      for (const Tag tag : sent) {
        transport.send(next_of(transport), tag, {at::full({tag.number + 1}, step + 10.0 * tag.number, device)}, far());
      }
      for (const std::uint32_t i : {5U, 0U, 7U, 2U, 1U, 6U, 4U, 3U}) {
        const Message found = transport.receive(previous_of(transport), {.channel = i % 2 * 2, .number = i}, far());
        EXPECT_TRUE(same_message({at::full({i + 1}, step + 10.0 * i)}, found, device)) << "message " << i;
      }
      transport.end_step(far());
    }
  });
}

// The memory of a message is reused as soon as it may be. Without waits for the device, the host runs far ahead.
TEST_P(EveryDeviceWorld, KeepsTheMemoryOfMessagesInFlight) {
  world().run([](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    constexpr std::uint32_t kMessages = 60;
    const std::vector<Tag> tags = numbered(0, kMessages);
    const auto order = ring_order(transport, tags);
    at::Tensor sum = at::zeros({1000}, device);
    for (int step = 0; step < 3; ++step) {
      transport.set_order(order);
      transport.begin_step(1);
      for (const Tag tag : tags) {
        transport.post_receive(previous_of(transport), tag, device);
        transport.send(next_of(transport), tag, {at::full({1000}, static_cast<double>(tag.number), device) + 1}, far());
      }
      for (const Tag tag : tags) sum += transport.receive(previous_of(transport), tag, far())[0];
      transport.end_step(far());
    }
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({1000}, 3.0 * kMessages * (kMessages + 1) / 2)));
  });
}

TEST_P(EveryDeviceWorld, NeverWaitsForADevice) {
  World all = world();
  const auto steps = [](Transport& transport, int count) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    std::vector<Tag> tags = numbered(0, 4);
    for (const Tag tag : numbered(1, 4)) tags.push_back(tag);
    const auto order = ring_order(transport, tags);
    for (int step = 0; step < count; ++step) {
      transport.set_order(order);
      transport.begin_step(1);
      const auto peer = [&](Tag tag, bool to) {
        return (tag.channel == 0) == to ? next_of(transport) : previous_of(transport);
      };
      for (const Tag tag : tags) transport.post_receive(peer(tag, false), tag, device);
      for (const Tag tag : tags) transport.send(peer(tag, true), tag, {at::ones({300}, device) * 2}, far());
      for (const Tag tag : tags) transport.receive(peer(tag, false), tag, far())[0] *= 2;
      transport.end_step(far());
    }
  };
  const std::uint64_t before = sim::counters().host_waits;
  all.run([&](Transport& transport) { steps(transport, 4); });
  EXPECT_EQ(sim::counters().host_waits, before);
}

TEST_P(EveryDeviceWorld, TimesOutWithoutAMessage) {
  World all = world();
  all.run([](Transport& transport) { transport.set_order(ring_order(transport, numbered(0, 1))); });
  all[1].begin_step(1);
  all[1].post_receive(0, {}, sim_device(1));
  EXPECT_EQ(thrown_by([&] { all[1].receive(0, {}, soon()); }),
            timeout(0, "no message came from rank 0 within the deadline"));
}

TEST_P(EveryDeviceWorld, EndsWaitsForMessagesWhenARankAborts) {
  World all = world();
  std::atomic<int> ready = 0;
  all.run([&](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    transport.set_order(ring_order(transport, numbered(0, 1)));
    transport.begin_step(1);
    transport.post_receive(previous_of(transport), {}, device);
    ++ready;
    if (transport.rank() == 0) {
      while (ready < transport.ranks()) std::this_thread::yield();
      transport.abort("stage 3 is out of memory");
    } else if (previous_of(transport) != 0) {
      EXPECT_EQ(thrown_by([&] { transport.receive(previous_of(transport), {}, far()); }),
                aborted("stage 3 is out of memory"));
    }
    EXPECT_EQ(thrown_by([&] { transport.receive(previous_of(transport), {}, far()); }),
              aborted("stage 3 is out of memory"));
  });
}

TEST_P(EveryDeviceWorld, CanBeDestroyedWithMessagesInFlight) {
  world().run([](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    transport.set_order(ring_order(transport, numbered(0, 5)));
    transport.begin_step(1);
    for (std::uint32_t i = 0; i < 5; ++i) transport.post_receive(previous_of(transport), {.number = i}, device);
    for (std::uint32_t i = 0; i < 3; ++i) {
      transport.send(next_of(transport), {.number = i}, {at::ones({2000}, device)}, far());
    }
  });
}

// Calls act(transport) for each rank, in a scope of its device, after a step in which all messages have been exchanged,
// so that later steps send no shapes.
void after_a_step(World& world, const std::vector<Tag>& tags, const std::function<void(Transport&, at::Device)>& act) {
  world.run([&](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    const auto order = ring_order(transport, tags);
    transport.set_order(order);
    transport.begin_step(1);
    for (const Tag tag : tags) transport.send(next_of(transport), tag, {at::ones({100}, device)}, far());
    for (const Tag tag : tags) transport.receive(previous_of(transport), tag, far());
    transport.end_step(far());
    transport.set_order(order);
    transport.begin_step(1);
    act(transport, device);
  });
}

void wait_until_idle(at::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Returns what a call throws that is repeated until it throws.
Thrown thrown_in_time(Transport& transport) {
  for (const Deadline end = far(); Clock::now() < end;) {
    const Thrown found = thrown_by([&] { transport.post_receive(previous_of(transport), {}, at::kCPU); });
    if (found.threw) return found;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
}

// The host of rank 0 has sent the message, and its device has not computed it.
TEST(DirectTransport, TimesOutWhenADeviceHasNotComputedAMessage) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  StreamGate gate;
  std::atomic<bool> is_over = false;
  after_a_step(world, numbered(0, 2), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 0) {
      gate.close(device);
      transport.send(1, {.number = 0}, {at::ones({100}, device)}, far());
      while (!is_over) std::this_thread::yield();
      return;
    }
    const auto began = Clock::now();
    Message late = transport.receive(0, {.number = 0}, Clock::now() + std::chrono::milliseconds(500));
    late[0] += 1;
    // The stream continues after the deadline.
    wait_until_idle(device);
    EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(400));
    EXPECT_EQ(thrown_in_time(transport), timeout(0, "no message came from rank 0 within the deadline"));
    EXPECT_EQ(thrown_by([&] { transport.end_step(far()); }),
              timeout(0, "no message came from rank 0 within the deadline"));
    // The error's report says which message it was, as the host has gone on.
    const std::optional<AwaitedMessage> awaited = transport.awaited_by_device();
    ASSERT_TRUE(awaited.has_value());
    EXPECT_EQ(awaited->peer, 0);
    EXPECT_EQ(awaited->tag, Tag{});
    EXPECT_TRUE(awaited->is_receive);
    EXPECT_GE(awaited->since, began);
    is_over = true;
    gate.open();
  });
}

// Otherwise its memory would grow with the number of messages.
TEST(DirectTransport, WaitsForAReceiverThatIsFarBehind) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  constexpr std::uint32_t kMessages = 200;
  std::atomic<bool> is_over = false;
  after_a_step(world, numbered(0, kMessages), [&](Transport& transport, at::Device device) {
    const at::Tensor message = at::ones({100}, device);
    if (transport.rank() == 1) {
      transport.receive(0, {.number = 0}, far());
      transport.send(0, {.number = 0}, {message}, far());
      while (!is_over) std::this_thread::yield();
      return;
    }
    transport.send(1, {.number = 0}, {message}, far());
    transport.receive(1, {.number = 0}, far());
    wait_until_idle(device);
    std::uint32_t sent = 1;
    EXPECT_EQ(thrown_by([&] {
                for (; sent < kMessages; ++sent) transport.send(1, {.number = sent}, {message}, soon());
              }),
              timeout(1, "no receive was posted on rank 1 within the deadline"));
    EXPECT_EQ(transport.waiting_for(), 1);
    // 128 may be in flight, and the first has been received.
    EXPECT_EQ(sent, 129U);
    is_over = true;
  });
}

TEST(StagedTransport, WaitsForADeviceThatIsFarBehind) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Staged));
  constexpr std::uint32_t kMessages = 200;
  StreamGate gate;
  after_a_step(world, numbered(0, kMessages), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 1) {
      // The opening of the channel arrives.
      transport.post_receive(0, {.number = 0}, device);
      return;
    }
    gate.close(device);
    std::uint32_t sent = 0;
    EXPECT_EQ(thrown_by([&] {
                for (; sent < kMessages; ++sent) {
                  transport.send(1, {.number = sent}, {at::ones({100}, device)}, soon());
                }
              }),
              timeout(TransportError::kNoPeer, "a device has not computed a message within the deadline"));
    EXPECT_GE(sent, 100U);
    EXPECT_LE(sent, 128U);
    gate.open();
  });
}

// The time of a receive counts from when the device is ready for it.
TEST(DirectTransport, CountsNoTimeInWhichTheReceiverIsStillComputing) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  StreamGate gate;
  after_a_step(world, numbered(0, 1), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 0) {
      gate.close(device);
      transport.send(1, {}, {at::full({100}, 7.0, device)}, far());
      transport.end_step(far());
      return;
    }
    StreamGate busy;
    busy.close(device);
    const Message found = transport.receive(0, {}, Clock::now() + std::chrono::milliseconds(300));
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    gate.open();
    transport.end_step(far());
    busy.open();
    EXPECT_TRUE(at::equal(found[0].cpu(), at::full({100}, 7.0)));
    transport.begin_step(1);
  });
}

TEST(DirectTransport, TimesOutWhenAMessageIsNotReceived) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  std::atomic<bool> is_over = false;
  after_a_step(world, numbered(0, 2), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 1) {
      // The opening of the channel arrives.
      transport.receive(0, {.number = 0}, far());
      transport.send(0, {.number = 0}, {at::ones({100}, device)}, far());
      transport.end_step(far());
      while (!is_over) std::this_thread::yield();
      return;
    }
    for (std::uint32_t i = 0; i < 2; ++i) transport.send(1, {.number = i}, {at::ones({100}, device)}, far());
    transport.receive(1, {.number = 0}, far());
    transport.end_step(Clock::now() + std::chrono::milliseconds(300));
    EXPECT_EQ(thrown_in_time(transport), timeout(1, "no receive was posted on rank 1 within the deadline"));
    is_over = true;
  });
}

TEST(DirectTransport, UnblocksItsStreamsWhenARankAborts) {
  World world(Carrier::Gloo, 3, options_of(DeviceCarrier::Direct));
  StreamGate gate;
  std::atomic<int> waiting = 0;
  after_a_step(world, numbered(0, 2), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 0) {
      gate.close(device);
      for (std::uint32_t i = 0; i < 2; ++i) transport.send(1, {.number = i}, {at::ones({100}, device)}, far());
      while (waiting < 2) std::this_thread::yield();
      transport.abort("stage 3 is out of memory");
      gate.open();
    } else {
      if (transport.rank() == 1) {
        at::Tensor sum = transport.receive(0, {.number = 0}, far())[0] + 1;
        transport.send(2, {.number = 0}, {sum}, far());
      } else {
        transport.receive(1, {.number = 0}, far())[0] += 1;
      }
      ++waiting;
      wait_until_idle(device);
    }
    EXPECT_EQ(thrown_by([&] { transport.end_step(far()); }), aborted("stage 3 is out of memory"));
  });
}

TEST(DirectTransport, UnblocksItsStreamsWhenARankIsLost) {
  World world(Carrier::Gloo, 3, options_of(DeviceCarrier::Direct));
  StreamGate gate;
  after_a_step(world, numbered(0, 2), [&](Transport& transport, at::Device device) {
    if (transport.rank() == 0) {
      gate.close(device);
      transport.send(1, {.number = 0}, {at::ones({100}, device)}, far());
      return;
    }
    if (transport.rank() == 1) {
      transport.receive(0, {.number = 0}, far())[0] += 1;
      world.leave(0);
      gate.open();
      wait_until_idle(device);
      const Thrown found = thrown_in_time(transport);
      EXPECT_EQ(found.why, TransportError::Why::PeerLost) << found.what;
      EXPECT_EQ(found, peer_lost(0, "rank 0 has ended"));
    }
  });
}

TEST(DirectTransport, RefusesMessagesThatAreNotInTheOrder) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  after_a_step(world, {{.number = 4}, {.number = 2}}, [&](Transport& transport, at::Device device) {
    const std::string peer = std::to_string(1 - transport.rank());
    expect_error<std::logic_error>([&] { transport.post_receive(1 - transport.rank(), {.number = 3}, device); },
                                   "message 3 of channel 0 from rank " + peer + " is not in the order of messages.");
    expect_error<std::logic_error>(
        [&] { transport.send(1 - transport.rank(), {.number = 2}, {at::ones({100}, device)}, far()); },
        "message 2 of channel 0 to rank " + peer +
            " is sent as number 1 of its step, expected 2 as in the order of messages.");
    MessageOrder twice = *ring_order(transport, {{.number = 1}, {.number = 1}});
    expect_error<std::invalid_argument>(
        [&] { transport.set_order(std::make_shared<const MessageOrder>(twice)); },
        "message 1 of channel 0 to rank " + peer + " is in the order of messages twice.");
  });
}

TEST(DirectTransport, ReportsABackendThatDoesNotConnect) {
  C10dOptions options;
  options.device_backends.create = [](const c10::intrusive_ptr<c10d::Store>&, int, int,
                                      at::Device) -> c10::intrusive_ptr<c10d::Backend> {
    throw std::runtime_error("the network is down");
  };
  World world(Carrier::Gloo, 2, options);
  const std::vector<std::string> errors =
      world.errors([](Transport& transport) { transport.set_order(ring_order(transport, {{.number = 0}})); });
  // A rank may find that the other one has failed before.
  const std::string expected =
      ": the network is down\n  Hint: NCCL_DEBUG=INFO prints what NCCL does. If devices cannot connect, stage tensors "
      "in CPU memory.";
  EXPECT_TRUE(errors[0].ends_with(expected) || errors[1].ends_with(expected)) << errors[0] << "\n" << errors[1];
}

TEST(DirectTransport, FindsOutThatRanksHaveOtherOrders) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  std::vector<std::string> errors = world.errors([](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    const bool is_first = transport.rank() == 0;
    transport.set_order(ring_order(transport, {{.number = is_first ? 0U : 1U}, {.number = is_first ? 1U : 0U}}));
    transport.begin_step(1);
    transport.send(1 - transport.rank(), {.number = is_first ? 0U : 1U}, {at::ones({100}, device)}, far());
    transport.receive(1 - transport.rank(), {.number = 0}, far());
  });
  const std::string expected =
      " sends the messages of channel 0 in another order than this rank expects.\n  Hint: call set_order() on all "
      "ranks, with the order of one schedule.";
  EXPECT_TRUE(errors[0] == "rank 1" + expected || errors[1] == "rank 0" + expected) << errors[0] << errors[1];
}

TEST(DirectTransport, StagesMessagesBetweenADeviceAndTheCpu) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  world.run([](Transport& transport) {
    const RankScope scope(sim_device(0));
    MessageOrder order;
    const MessageOrder::Entry up{.tag = {.channel = 0}, .from = at::kCPU, .to = sim_device(0)};
    const MessageOrder::Entry down{.tag = {.channel = 1}, .from = sim_device(0), .to = at::kCPU};
    (transport.rank() == 0 ? order.sent : order.received)[1 - transport.rank()].push_back(up);
    (transport.rank() == 0 ? order.received : order.sent)[1 - transport.rank()].push_back(down);
    const auto shared = std::make_shared<const MessageOrder>(order);
    for (int step = 0; step < 3; ++step) {
      transport.set_order(shared);
      transport.begin_step(1);
      if (transport.rank() == 0) {
        transport.post_receive(1, down.tag, at::kCPU);
        transport.send(1, up.tag, {counting({5})}, far());
        EXPECT_TRUE(same_message({counting({5}) * 2}, transport.receive(1, down.tag, far()), at::kCPU));
      } else {
        transport.post_receive(0, up.tag, sim_device(0));
        const Message found = transport.receive(0, up.tag, far());
        EXPECT_EQ(found[0].device(), sim_device(0));
        transport.send(0, down.tag, {found[0] * 2}, far());
      }
      transport.end_step(far());
    }
  });
}

TEST(DirectTransport, MovesTensorsThatAreOnAnotherDevice) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  world.run([](Transport& transport) {
    const at::Device device = sim_device(transport.rank());
    const RankScope scope(device);
    const auto order = ring_order(transport, numbered(0, 1));
    for (int step = 0; step < 3; ++step) {
      transport.set_order(order);
      transport.begin_step(1);
      const Message sent{counting({3}).pin_memory(), counting({4}).to(sim_device(3)), counting({5}).to(device)};
      transport.send(next_of(transport), {}, sent, far());
      EXPECT_TRUE(same_message(sent, transport.receive(previous_of(transport), {}, far()), device));
      transport.end_step(far());
    }
  });
}

TEST(DirectTransport, ConnectsSeveralDevicesOfARank) {
  World world(Carrier::Gloo, 2, options_of(DeviceCarrier::Direct));
  world.run([](Transport& transport) {
    const RankScope scope(sim_device(0));
    const int own = transport.rank();
    // Rank 0 has the devices 0 and 1, and rank 1 the devices 2 and 3.
    MessageOrder order;
    for (std::uint32_t channel = 0; channel < 8; ++channel) {
      const auto bit = [channel](unsigned index) { return static_cast<int>(channel >> index & 1U); };
      order.sent[1 - own].push_back(
          {{.channel = channel}, sim_device(2 * own + bit(1)), sim_device(2 - 2 * own + bit(2))});
      order.received[1 - own].push_back(
          {{.channel = channel}, sim_device(2 - 2 * own + bit(1)), sim_device(2 * own + bit(2))});
    }
    const auto shared = std::make_shared<const MessageOrder>(order);
    for (int step = 0; step < 3; ++step) {
      transport.set_order(shared);
      transport.begin_step(1);
      for (const MessageOrder::Entry& entry : order.sent.at(1 - own)) {
        transport.send(1 - own, entry.tag, {at::full({10}, entry.tag.channel + 10.0 * own, entry.from)}, far());
      }
      for (const MessageOrder::Entry& entry : order.received.at(1 - own)) {
        const Message found = transport.receive(1 - own, entry.tag, far());
        EXPECT_TRUE(same_message({at::full({10}, entry.tag.channel + 10.0 - 10.0 * own)}, found, entry.to));
      }
      transport.end_step(far());
    }
  });
}

}  // namespace
}  // namespace penstock::internal::testing
