// Tests that the stand-in of tests/device/cuda_standin finds what would fail on a GPU.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

class CudaStandin : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const preloaded = std::getenv("LD_PRELOAD");
    if (preloaded == nullptr || std::string(preloaded).find("cuda_standin") == std::string::npos || !at::hasCUDA()) {
      GTEST_SKIP() << "the stand-in is not preloaded";
    }
  }
};

TEST_F(CudaStandin, EndsAProcessThatReadsDeviceMemoryOnTheHost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor tensor = at::ones({10}).to(at::Device(at::kCUDA, 0));
  EXPECT_EXIT(std::exit(static_cast<int>(*static_cast<const volatile float*>(tensor.data_ptr()))),
              ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(CudaStandin, RunsNoKernels) {
  const at::Tensor tensor = at::ones({10}).to(at::Device(at::kCUDA, 0));
  EXPECT_NE(message_of([&] { at::neg(tensor); }).find("the stand-in runs no kernels"), std::string::npos);
}

TEST_F(CudaStandin, CopiesInTheOrderOfAStream) {
  const at::Device device(at::kCUDA, 0);
  const at::Tensor tensor = at::zeros({1000}).to(device);
  for (int i = 1; i <= 20; ++i) tensor.copy_(at::full({1000}, 1.0 * i).pin_memory(), /*non_blocking=*/true);
  EXPECT_EQ(tensor.cpu()[999].item<int>(), 20);
}

TEST_F(CudaStandin, AnEventOrdersTwoStreams) {
  const at::Device device(at::kCUDA, 0);
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  const at::Tensor pinned = at::full({1000}, 7.0).pin_memory();
  for (int i = 0; i < 20; ++i) {
    const at::Tensor tensor = at::zeros({1000}).to(device);
    const c10::Stream other = cuda.getStreamFromGlobalPool(device, false);
    c10::Event copied(at::kCUDA);
    tensor.copy_(pinned, /*non_blocking=*/true);
    copied.record(cuda.getStream(device));
    other.wait(copied);
    const c10::Stream before = cuda.exchangeStream(other);
    EXPECT_EQ(tensor.cpu()[0].item<int>(), 7);
    cuda.exchangeStream(before);
  }
}

}  // namespace
}  // namespace penstock::internal::testing
