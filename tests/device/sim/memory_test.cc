// Memory: faults of the host, pinned memory, the caching allocator, its statistics, and storages that change their size.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <future>

#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

class Memory : public SimTest {};

// Death tests run in a process of their own, which installs the device anew: threads do not survive a fork.
class MemoryDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

float read_first(const at::Tensor& tensor) {
  return *static_cast<const volatile float*>(tensor.const_data_ptr());
}
void write_first(const at::Tensor& tensor) {
  *static_cast<volatile float*>(tensor.mutable_data_ptr()) = 1;
}

TEST_F(MemoryDeathTest, EndsAProcessThatReadsDeviceMemory) {
  EXPECT_EXIT(read_first(at::ones({1000}, device(1))), testing::ExitedWithCode(kExitDeviceMemory),
              "sim: the host touched memory of device 1");
}

TEST_F(MemoryDeathTest, EndsAProcessThatWritesDeviceMemory) {
  EXPECT_EXIT(write_first(at::ones({1000}, device(0))), testing::ExitedWithCode(kExitDeviceMemory),
              "sim: the host touched memory of device 0");
}

// The copy may be complete; what counts is that nobody has waited for it.
TEST_F(MemoryDeathTest, EndsAProcessThatReadsPinnedMemoryBeforeItWaits) {
  EXPECT_EXIT(
      {
        const at::Tensor host = at::zeros({1000}, at::TensorOptions(device(0)).device(at::kCPU).pinned_memory(true));
        host.copy_(at::ones({1000}, device(0)), /*non_blocking=*/true);
        read_first(host);
      },
      testing::ExitedWithCode(kExitPinnedMemory), "pinned memory with a copy in flight");
}

TEST_F(MemoryDeathTest, EndsAProcessThatWritesPinnedMemoryBeforeItWaits) {
  EXPECT_EXIT(
      {
        const at::Device device = sim::device(0);
        const at::Tensor host = at::ones({1000}, at::TensorOptions().pinned_memory(true));
        const at::Tensor copy = host.to(device, /*non_blocking=*/true);
        if (read_first(host) != 1) std::_Exit(1);  // reading is allowed
        write_first(host);
      },
      testing::ExitedWithCode(kExitPinnedMemory), "pinned memory with a copy in flight");
}

TEST_F(MemoryDeathTest, EndsAProcessWhoseKernelFails) {
  EXPECT_EXIT(
      {
        const at::Device device = sim::device(0);
        at::embedding(at::ones({4, 2}, device), at::full({1}, 9, at::TensorOptions(device).dtype(at::kLong)));
        synchronize(device);
      },
      testing::ExitedWithCode(kExitKernelFailed), "sim: aten::index_select on stream 0 of device 0 failed");
}

TEST_F(MemoryDeathTest, ReportsRacesWhenAProcessExits) {
  EXPECT_EXIT(
      {
        ::setenv("PENSTOCK_SIM_DEVICES", "2", 1);
        if (penstock_device_install() != 0) std::_Exit(1);
        const at::Device device(kDeviceType, 1);
        const at::Tensor x = at::zeros({4}, device);
        const c10::StreamGuard guard(new_stream(device));
        x.add_(1);
        std::exit(0);
      },
      testing::ExitedWithCode(kExitRaces), "sim: race in a block of 512 bytes on device 1(.|\n)*sim: 1 races");
}

TEST_F(MemoryDeathTest, KeepsTheExitCodeOfAProcessWithoutRaces) {
  EXPECT_EXIT(
      {
        if (penstock_device_install() != 0) std::_Exit(1);
        static const at::Tensor alive = at::zeros({4}, at::Device("sim:3"));
        std::exit(5);
      },
      testing::ExitedWithCode(5), "");
}

TEST_F(Memory, GivesAnErrorToSystemCalls) {
  const at::Tensor x = at::ones({1000}, d0);
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  EXPECT_EQ(::write(pipe[1], x.const_data_ptr(), 4000), -1);
  EXPECT_EQ(errno, EFAULT);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST_F(Memory, AllowsPinnedMemoryOnceTheHostHasWaited) {
  const at::Tensor host = at::zeros({1000}, at::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(host.is_pinned());
  host.copy_(at::ones({1000}, d0), /*non_blocking=*/true);
  c10::Event event(kDeviceType);
  event.record(current_stream_of(d0));
  event.synchronize();
  EXPECT_EQ(host.sum().item<float>(), 1000);
  host.zero_();
  EXPECT_FALSE(at::zeros({4}).is_pinned());
  EXPECT_TRUE(at::zeros({4}).pin_memory().is_pinned());
}

TEST_F(Memory, KeepsPinnedMemoryUntilItsCopyIsComplete) {
  // The copy cannot run before the event of the other stream, which holds back until `released`.
  std::promise<void> released;
  const c10::Stream held = new_stream(d0);
  launch(held, "hold", {}, [future = released.get_future().share()] { future.wait(); });
  wait_for(current_stream_of(d0), held);
  at::Tensor x;
  const void* pointer = nullptr;
  {
    const at::Tensor host = at::full({1000}, 3.0, at::TensorOptions().pinned_memory(true));
    pointer = host.const_data_ptr();
    x = host.to(d0, /*non_blocking=*/true);
  }
  const at::Tensor other = at::full({1000}, 4.0, at::TensorOptions().pinned_memory(true));
  EXPECT_NE(other.const_data_ptr(), pointer);
  released.set_value();
  EXPECT_EQ(x.sum().item<float>(), 3000);
}

TEST_F(Memory, IsReusedAtOnceOnItsStream) {
  const void* pointer = at::ones({12'345}, d0).const_data_ptr();
  EXPECT_EQ(at::ones({12'345}, d0).const_data_ptr(), pointer);
  const c10::StreamGuard guard(new_stream(d0));
  EXPECT_NE(at::ones({12'345}, d0).const_data_ptr(), pointer);
}

TEST_F(Memory, HasStatistics) {
  auto* const allocator = at::getDeviceAllocator(kDeviceType);
  allocator->emptyCache();
  allocator->resetPeakStats(1);
  const auto allocated = [&] { return allocator->getDeviceStats(1).allocated_bytes[0]; };
  const auto before = allocated().current;
  EXPECT_EQ(allocated().peak, before);
  {
    const at::Tensor x = at::empty({1024}, d1);
    EXPECT_EQ(allocated().current, before + 4096);
  }
  EXPECT_EQ(allocated().current, before);
  EXPECT_EQ(allocated().peak, before + 4096);
  allocator->resetPeakStats(1);
  EXPECT_EQ(allocated().peak, before);
  EXPECT_EQ(allocator->getDeviceStats(1).reserved_bytes[0].current, before + 4096);
  allocator->emptyCache();
  EXPECT_EQ(allocator->getDeviceStats(1).reserved_bytes[0].current, before);
  const auto [free, total] = allocator->getMemoryInfo(1);
  EXPECT_EQ(total, std::size_t{4} << 30U);
  EXPECT_EQ(free, total - static_cast<std::size_t>(before));
}

TEST_F(Memory, EndsAndComesBackFromTheCache) {
  constexpr std::int64_t kGigabyte = std::int64_t{1} << 30;
  const auto bytes = at::TensorOptions(d1).dtype(at::kByte);
  EXPECT_THROW(at::empty({5 * kGigabyte}, bytes), c10::OutOfMemoryError);
  // Cached blocks of other sizes are returned if memory is short.
  at::empty({3 * kGigabyte}, bytes);
  EXPECT_EQ(at::empty({2 * kGigabyte}, bytes).numel(), 2 * kGigabyte);
}

TEST_F(Memory, OfAStorageChangesItsSize) {
  const at::Tensor x = at::arange(8, at::TensorOptions(d1).dtype(at::kFloat));
  c10::Storage storage = x.storage();
  at::native::resize_bytes_nocuda(storage, 16);
  EXPECT_EQ(storage.nbytes(), 16U);
  at::native::resize_bytes_nocuda(storage, 64);
  EXPECT_EQ(storage.nbytes(), 64U);
  EXPECT_EQ(storage.device(), d1);
  const at::Tensor first = x.narrow(0, 0, 4);
  EXPECT_TRUE(same_bits({first}, {at::arange(4, at::kFloat)}));
  at::native::resize_bytes_nocuda(storage, 0);
  EXPECT_EQ(storage.data(), nullptr);
}

TEST_F(Memory, IsCopiedOnWrite) {
  const at::Tensor x = at::ones({64}, d1);
  const at::Tensor clone = at::_lazy_clone(x);
  EXPECT_EQ(clone.const_data_ptr(), x.const_data_ptr());
  clone.add_(1);
  EXPECT_TRUE(same_bits({x, clone}, {at::ones({64}), at::full({64}, 2.0)}));
}

TEST_F(Memory, OfAStorageIsFreedAndFilledAgain) {
  at::Tensor w = at::ones({64}, d1).requires_grad_(true);
  const at::Tensor loss = (w * w).sum();
  const std::int64_t version = w._version();
  c10::StorageImpl& storage = *w.storage().unsafeGetStorageImpl();
  const std::size_t bytes = storage.nbytes();
  const auto before = at::getDeviceAllocator(kDeviceType)->getDeviceStats(1).allocated_bytes[0].current;
  storage.set_data_ptr({nullptr, d1});
  storage.set_nbytes(0);
  EXPECT_LT(at::getDeviceAllocator(kDeviceType)->getDeviceStats(1).allocated_bytes[0].current, before);
  {
    const c10::DeviceGuard guard(d1);
    storage.set_data_ptr(storage.allocator()->allocate(bytes));
    storage.set_nbytes(bytes);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    w.fill_(3);
  }
  EXPECT_EQ(w._version(), version);
  loss.backward();
  EXPECT_TRUE(same_bits({w.grad()}, {at::full({64}, 6.0)}));
}

}  // namespace
}  // namespace penstock::sim
