// Devices, streams, events with timing, generators, autocast and counters.
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <functional>
#include <future>
#include <thread>

#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

class Device : public SimTest {};

TEST_F(Device, IsTheAcceleratorOfTheProcess) {
  EXPECT_EQ(at::getAccelerator(), kDeviceType);
  EXPECT_TRUE(at::isAccelerator(kDeviceType));
  EXPECT_EQ(at::accelerator::deviceCount(), 3);
  EXPECT_EQ(at::Device("sim:1"), d1);
  const c10::DeviceGuard guard(d1);
  EXPECT_EQ(at::accelerator::getDeviceIndex(), 1);
  EXPECT_EQ(at::empty({2}, kDeviceType).device(), d1);
}

TEST_F(Device, HasCurrentStreamsByThread) {
  const c10::Stream side = new_stream(d0);
  const c10::StreamGuard guard(side);
  EXPECT_EQ(current_stream_of(d0), side);
  std::thread([&] { EXPECT_EQ(current_stream_of(d0).id(), 0); }).join();
}

TEST_F(Device, RefusesTensorsOfTwoDevices) {
  const at::Tensor x = at::ones({4}, d0);
  EXPECT_THROW(x + at::ones({4}, d1), c10::Error);
  EXPECT_THROW(x + at::ones({4}), c10::Error);
  EXPECT_THROW(at::embedding(at::ones({4, 2}, d0), at::zeros({1}, at::kLong)), c10::Error);
  EXPECT_TRUE(same_bits({x + at::scalar_tensor(2)}, {at::full({4}, 3.0)}));
}

TEST_F(Device, CopiesBetweenAllPlaces) {
  const at::Tensor x = at::randn({3, 5});
  for (const bool non_blocking : {false, true}) {
    const at::Tensor there = x.to(d0, non_blocking);
    const at::Tensor transposed = x.to(d0, non_blocking).t().to(d1, non_blocking);
    // With non_blocking this is pinned memory, which the host may read once it has waited.
    const at::Tensor back = there.to(at::kCPU, non_blocking);
    EXPECT_EQ(back.is_pinned(), non_blocking);
    synchronize(d0);
    EXPECT_TRUE(same_bits({back, transposed}, {x, x.t()}));
    EXPECT_TRUE(same_bits({x.pin_memory().to(d1, non_blocking)}, {x}));
    EXPECT_TRUE(same_bits({x.to(d0, at::kBFloat16, non_blocking), there.to(at::kHalf), there.to(at::kDouble)},
                          {x.to(at::kBFloat16), x.to(at::kHalf), x.to(at::kDouble)}));
  }
}

TEST_F(Device, TakesPageableMemoryBeforeACopyReturns) {
  // The copy cannot run before `released`.
  std::promise<void> released;
  launch(current_stream_of(d0), "hold", {}, [future = released.get_future().share()] { future.wait(); });
  const at::Tensor x = at::ones({100});
  const at::Tensor there = x.to(d0, /*non_blocking=*/true);
  x.zero_();
  released.set_value();
  EXPECT_TRUE(same_bits({there}, {at::ones({100})}));
}

TEST_F(Device, MeasuresTimeBetweenEvents) {
  using c10::EventFlag;
  c10::Event first(kDeviceType, EventFlag::BACKEND_DEFAULT);
  c10::Event second(kDeviceType, EventFlag::BACKEND_DEFAULT);
  c10::Event third(kDeviceType, EventFlag::BACKEND_DEFAULT);
  first.record(current_stream_of(d0));
  at::ones({64, 64}, d0).mm(at::ones({64, 64}, d0));
  second.record(current_stream_of(d0));
  // The other device passes its event later.
  second.block(current_stream_of(d1));
  third.record(current_stream_of(d1));
  third.synchronize();
  EXPECT_GT(first.elapsedTime(second), 0);
  EXPECT_GT(second.elapsedTime(third), 0);
  EXPECT_DOUBLE_EQ(first.elapsedTime(second) + second.elapsedTime(third), first.elapsedTime(third));
  EXPECT_LT(third.elapsedTime(first), 0);
}

TEST_F(Device, CountsHostWaits) {
  const at::Tensor x = at::ones({4}, d0);
  const at::Tensor host = at::empty({4}, at::TensorOptions().pinned_memory(true));
  const auto waits_of = [](const std::function<void()>& function) {
    const std::uint64_t before = counters().host_waits;
    function();
    return counters().host_waits - before;
  };
  EXPECT_EQ(waits_of([&] { x.add(1).mul_(2).sum(); }), 0U);
  EXPECT_EQ(waits_of([&] { host.copy_(x, /*non_blocking=*/true); }), 0U);
  EXPECT_EQ(waits_of([&] { x.sum().item<float>(); }), 1U);
  EXPECT_EQ(waits_of([&] { x.nonzero(); }), 1U);
  EXPECT_EQ(waits_of([&] { x.index({x > 0}); }), 1U);
  EXPECT_EQ(waits_of([&] { x.masked_fill(x > 0, 2); }), 0U);
  EXPECT_EQ(waits_of([&] { x.cpu(); }), 1U);
  EXPECT_EQ(waits_of([&] { at::equal(x, x); }), 1U);
  EXPECT_EQ(waits_of([&] { synchronize(d0); }), 1U);
  trace_host_waits(true);
  x.sum().item<float>();
  trace_host_waits(false);
  x.sum().item<float>();
  const auto traces = take_host_wait_traces();
  ASSERT_EQ(traces.size(), 1U);
  EXPECT_TRUE(contains(traces[0], "_local_scalar_dense"));
}

TEST_F(Device, RunsInInferenceMode) {
  const c10::InferenceMode guard;
  const at::Tensor y = at::layer_norm(at::linear(at::ones({4, 4}, d0), at::ones({4, 4}, d0)).relu_(), {4});
  EXPECT_TRUE(y.is_inference());
  EXPECT_TRUE(same_bits({y.add_(1)}, {at::ones({4, 4})}));
}

class Generators : public SimTest {
 protected:
  static at::Generator generator(at::Device device) { return at::globalContext().defaultGenerator(device); }
  // Draws with everything that models use.
  static std::vector<at::Tensor> draw(at::Device device) {
    const auto options = at::TensorOptions(device);
    std::vector<at::Tensor> all{at::randn({50}, options),
                                at::rand({50}, options),
                                at::randperm(50, options),
                                at::randint(100, {50}, options),
                                at::dropout(at::ones({50}, options), 0.5, /*train=*/true),
                                at::empty({50}, options).bernoulli_(0.5),
                                at::multinomial(at::ones({50}, options), 10),
                                at::empty({50}, options).exponential_()};
    return all;
  }
};

TEST_F(Generators, RepeatNumbersAfterTheSameSeedAndOffset) {
  at::Generator generator = Generators::generator(d0);
  generator.set_current_seed(5);
  EXPECT_EQ(generator.get_offset(), 0U);
  const auto first = draw(d0);
  const std::uint64_t offset = generator.get_offset();
  EXPECT_EQ(offset, 4 * first.size());
  const at::Tensor next = at::randn({50}, d0);
  EXPECT_FALSE(at::equal(next.cpu(), first[0].cpu()));
  generator.set_current_seed(5);
  EXPECT_TRUE(same_bits(draw(d0), first));
  generator.set_current_seed(5);
  generator.set_offset(offset);
  EXPECT_TRUE(same_bits({at::randn({50}, d0)}, {next}));
  // Every device has its own.
  at::Generator other = Generators::generator(d1);
  other.set_current_seed(5);
  EXPECT_TRUE(same_bits(draw(d1), first));
}

TEST_F(Generators, AreClonedAndRestored) {
  at::Generator generator = Generators::generator(d0);
  generator.set_current_seed(6);
  at::randn({4}, d0);
  const at::Tensor state = generator.get_state();
  at::Generator copy = generator.clone();
  EXPECT_EQ(copy.current_seed(), 6U);
  EXPECT_EQ(copy.get_offset(), 4U);
  const at::Tensor numbers = at::randn({4}, d0);
  EXPECT_TRUE(same_bits({at::randn({4}, copy, at::TensorOptions(d0))}, {numbers}));
  generator.set_state(state);
  EXPECT_TRUE(same_bits({at::randn({4}, d0)}, {numbers}));
  at::Generator created = at::globalContext().getAcceleratorHooksInterface(kDeviceType).getNewGenerator(1);
  created.set_current_seed(7);
  EXPECT_EQ(created.device(), d1);
  EXPECT_THROW(at::randn({4}, created, at::TensorOptions(d0)), c10::Error);
}

TEST_F(Generators, DropTheExpectedPart) {
  const float kept = at::dropout(at::ones({1000}, d0), 0.25, /*train=*/true).gt(0).sum().item<float>();
  EXPECT_GT(kept, 650);
  EXPECT_LT(kept, 850);
  at::Tensor x = at::ones({64}, d0).requires_grad_(true);
  const at::Tensor y = at::dropout(x, 0.5, /*train=*/true);
  y.sum().backward();
  EXPECT_TRUE(same_bits({x.grad()}, {y}));
}

class Autocast : public SimTest {
 protected:
  void TearDown() override {
    at::autocast::set_autocast_enabled(kDeviceType, false);
    at::autocast::clear_cache();
    SimTest::TearDown();
  }
};

TEST_F(Autocast, CastsByTheListsOfCuda) {
  const at::Tensor x = at::randn({4, 4}, d0);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    at::autocast::set_autocast_enabled(kDeviceType, true);
    at::autocast::set_autocast_dtype(kDeviceType, type);
    const at::Tensor product = at::linear(x, x);
    EXPECT_EQ(product.scalar_type(), type);
    EXPECT_EQ(at::softmax(product, -1).scalar_type(), at::kFloat);
    EXPECT_EQ(at::layer_norm(product, {4}).scalar_type(), at::kFloat);
    EXPECT_EQ(at::addcmul(product, product, x).scalar_type(), at::kFloat);
    EXPECT_EQ((product + x).scalar_type(), at::kFloat);
    EXPECT_EQ(at::linear(x.to(at::kDouble), x.to(at::kDouble)).scalar_type(), at::kDouble);
    EXPECT_THROW(at::binary_cross_entropy(x.sigmoid(), x.sigmoid()), c10::Error);
    at::autocast::set_autocast_enabled(kDeviceType, false);
    at::autocast::clear_cache();
    EXPECT_EQ(at::linear(x, x).scalar_type(), at::kFloat);
  }
}

TEST_F(Autocast, TrainsWithTheBitsOfExplicitCasts) {
  at::Tensor w = at::randn({8, 8}, d0).requires_grad_(true);
  at::Tensor v = w.detach().clone().requires_grad_(true);
  const at::Tensor x = at::randn({4, 8}, d0);
  at::autocast::set_autocast_enabled(kDeviceType, true);
  at::autocast::set_autocast_dtype(kDeviceType, at::kBFloat16);
  const at::Tensor loss = at::mse_loss(at::linear(x, w), at::zeros({4, 8}, d0));
  at::autocast::set_autocast_enabled(kDeviceType, false);
  at::autocast::clear_cache();
  loss.backward();
  const at::Tensor product = at::linear(x.to(at::kBFloat16), v.to(at::kBFloat16));
  at::mse_loss(product.to(at::kFloat), at::zeros({4, 8}, d0)).backward();
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(same_bits({w.grad()}, {v.grad()}));
}

}  // namespace
}  // namespace penstock::sim
