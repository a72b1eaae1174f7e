// The detector finds each kind of race whatever the timing, and reports none in a correct program.
#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

class Races : public SimTest {};

// The side stream reads what the default stream writes.
at::Tensor read_on_side_stream(at::Device device, bool waits) {
  const c10::Stream side = new_stream(device);
  at::Tensor x = at::zeros({16, 16}, device);
  for (int i = 0; i < 10; ++i) x.add_(1);
  if (waits) wait_for(side, current_stream_of(device));
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x * 2;
  }
  synchronize(device);
  return y;
}

TEST_F(Races, AreNotReportedIfTheReaderWaitsForAnEvent) {
  EXPECT_TRUE(same_bits({read_on_side_stream(d0, /*waits=*/true)}, {at::full({16, 16}, 20.0)}));
  EXPECT_EQ(take_races(), std::vector<std::string>{});
}

TEST_F(Races, AreFoundEachTimeThatAReaderDoesNotWait) {
  for (int i = 0; i < 5; ++i) {
    read_on_side_stream(d0, /*waits=*/false);
    EXPECT_EQ(take_races().size(), 1U);
  }
}

TEST_F(Races, NameBothOperatorsStreamsTensorsAndBytes) {
  const c10::Stream side = new_stream(d0);
  at::Tensor x = at::zeros({4, 8}, d0);
  {
    const c10::StreamGuard guard(side);
    x[1].mul_(2);
  }
  synchronize(d0);
  const auto races = take_races();
  ASSERT_FALSE(races.empty());
  EXPECT_TRUE(contains(races[0], "aten::mul.out reads bytes 32 to 64 (tensor [8]) on stream " +
                                     std::to_string(side.id()) + " of device 0"));
  EXPECT_TRUE(contains(races[0], "aten::zero_ writes bytes 0 to 128 (tensor [4, 8]) on stream 0 of device 0"));
  EXPECT_TRUE(contains(races[0], "Hint: record an event"));
}

TEST_F(Races, AreFoundIfAWriterDoesNotWaitForAReader) {
  const c10::Stream side = new_stream(d0);
  at::Tensor x = at::zeros({64}, d0);
  synchronize(d0);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  x.fill_(7);
  synchronize(d0);
  EXPECT_EQ(take_races().size(), 1U);
}

TEST_F(Races, AreFoundBetweenDevices) {
  at::Tensor x = at::zeros({64}, d0);
  at::Tensor y = x.to(d1, /*non_blocking=*/true);
  EXPECT_TRUE(same_bits({y}, {at::zeros({64})}));
  {
    const c10::StreamGuard guard(new_stream(d1));
    y.add_(1);  // the host has waited for the copy
  }
  y.add_(1);
  EXPECT_FALSE(take_races().empty());
}

// A tensor is freed while another stream uses it, and its memory is allocated again.
void reuse_memory(at::Device device, bool record) {
  const c10::Stream side = new_stream(device);
  {
    at::Tensor x = at::ones({1000}, device);
    wait_for(side, current_stream_of(device));
    const c10::StreamGuard guard(side);
    const at::Tensor y = x * 3;
    if (record) x.record_stream(side);
  }
  const at::Tensor z = at::full({1000}, 7.0, device);
  synchronize(device);
}

TEST_F(Races, AreFoundInMemoryThatIsReusedWithoutRecordStream) {
  reuse_memory(d0, /*record=*/false);
  const auto races = take_races();
  ASSERT_EQ(races.size(), 1U);
  EXPECT_TRUE(contains(races[0], "freed and allocated again"));
}

TEST_F(Races, AreNotReportedAfterRecordStream) {
  reuse_memory(d0, /*record=*/true);
  EXPECT_EQ(take_races(), std::vector<std::string>{});
}

TEST_F(Races, AreNotReportedForDisjointPartsOfATensor) {
  const c10::Stream side = new_stream(d0);
  at::Tensor x = at::zeros({2, 4096}, d0);
  synchronize(d0);
  {
    const c10::StreamGuard guard(side);
    x[1].fill_(1);
  }
  x[0].fill_(1);
  synchronize(d0);
  EXPECT_EQ(x.sum().item<float>(), 8192);
}

TEST_F(Races, AreNotReportedIfTheHostWaits) {
  const c10::Stream side = new_stream(d0);
  at::Tensor x = at::ones({64}, d0);
  current_stream_of(d0).synchronize();
  const c10::StreamGuard guard(side);
  EXPECT_EQ(x.sum().item<float>(), 64);
}

TEST_F(Races, AreNotReportedInAPipelineOfStreams) {
  const c10::Stream load = new_stream(d0);
  const c10::Stream store = new_stream(d0);
  std::vector<at::Tensor> outputs;
  at::Tensor sum = at::zeros({128}, d0);
  for (int i = 0; i < 8; ++i) {
    at::Tensor x;
    {
      const c10::StreamGuard guard(load);
      x = at::full({128}, i, at::TensorOptions().pinned_memory(true)).to(d0, /*non_blocking=*/true);
    }
    wait_for(current_stream_of(d0), load);
    x.record_stream(current_stream_of(d0));
    sum.add_(x * 2);
    at::Tensor copy = sum.clone();
    wait_for(store, current_stream_of(d0));
    const c10::StreamGuard guard(store);
    outputs.push_back(at::empty({128}, at::TensorOptions().pinned_memory(true)));
    outputs.back().copy_(copy, /*non_blocking=*/true);
    copy.record_stream(store);
  }
  store.synchronize();
  EXPECT_TRUE(same_bits({outputs[7]}, {at::full({128}, 56.0)}));
}

TEST_F(Races, AreThrownIfAskedFor) {
  set_throw_races(true);
  const c10::Stream side = new_stream(d0);
  at::Tensor x = at::zeros({64}, d0);
  EXPECT_THROW(
      {
        const c10::StreamGuard guard(side);
        x.add_(1);
      },
      c10::Error);
  set_throw_races(false);
  synchronize(d0);
  take_races();
}

TEST_F(Races, OfBackwardAreFoundIfAThirdStreamUsesGradients) {
  const c10::Stream forward = new_stream(d0);
  const c10::Stream other = new_stream(d0);
  const c10::Stream third = new_stream(d0);
  at::Tensor w = at::ones({16, 16}, d0).requires_grad_(true);
  synchronize(d0);
  at::Tensor loss;
  {
    const c10::StreamGuard guard(forward);
    loss = w.mm(w).sum();
  }
  wait_for(other, forward);
  const c10::StreamGuard guard(other);
  loss.backward();
  // The engine lets the stream wait on which backward() was called.
  EXPECT_EQ((w.grad() * 2).sum().item<float>(), 16 * 16 * 64);
  EXPECT_EQ(take_races(), std::vector<std::string>{});
  w.grad().mul_(2);
  {
    const c10::StreamGuard third_guard(third);
    w.grad().mul_(2);
  }
  EXPECT_FALSE(take_races().empty());
}

}  // namespace
}  // namespace penstock::sim
