// Tests that results do not depend on the alignment of tensors, and that instructions which trap are detected safely.
#include "penstock/tensor/cpu_kernels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "penstock/tensor/cpu_instructions.h"

namespace penstock::internal::testing {
namespace {

// Returns a copy whose first element lies `offset` elements after the start of its memory.
at::Tensor moved(const at::Tensor& tensor, std::int64_t offset) {
  const at::Tensor memory = at::empty({offset + tensor.numel()}, tensor.options());
  at::Tensor result = memory.narrow(0, offset, tensor.numel()).view(tensor.sizes());
  return result.copy_(tensor);
}

TEST(CpuKernels, AProductIsBitwiseIdenticalAtEveryAlignment) {
  if (std::getenv("MKL_CBWR") == nullptr) {
    EXPECT_EQ(why_not_reproducible(), std::nullopt);
  }
  at::manual_seed(7);
  constexpr std::int64_t kOffsets = 16;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const std::int64_t rows : {1, 2, 3, 5, 8, 13}) {
      for (const std::int64_t inner : {1, 3, 7, 16, 32, 33}) {
        for (const std::int64_t columns : {1, 2, 3, 9, 16, 31}) {
          const at::Tensor left = at::randn({rows, inner}, dtype);
          const at::Tensor right = at::randn({inner, columns}, dtype);
          const at::Tensor expected = at::mm(left, right);
          for (std::int64_t offset = 0; offset < kOffsets; ++offset) {
            EXPECT_TRUE(at::equal(at::mm(moved(left, offset), right), expected) &&
                        at::equal(at::mm(left, moved(right, offset)), expected))
                << dtype << " " << rows << "x" << inner << " times " << inner << "x" << columns << ", offset "
                << offset;
          }
        }
      }
    }
  }
}

TEST(CpuKernels, AnAttemptThatTrapsDoesNotSurvive) {
  EXPECT_TRUE(internal::survives([] {}));
  EXPECT_FALSE(internal::survives([] { __builtin_trap(); }));
  EXPECT_FALSE(internal::survives([] { std::abort(); }));
  EXPECT_FALSE(internal::survives([] { ::_Exit(0); }));
}

TEST(CpuKernels, OneDnnIsLimitedWhereAmxIsReportedAndTraps) {
  const auto works = [] { return true; };
  const auto traps = [] { return false; };
  EXPECT_EQ(internal::onednn_limit(/*reports_amx=*/true, traps), "AVX512_CORE_BF16");
  EXPECT_EQ(internal::onednn_limit(/*reports_amx=*/true, works), std::nullopt);
  EXPECT_EQ(internal::onednn_limit(/*reports_amx=*/false, traps), std::nullopt);
}

}  // namespace
}  // namespace penstock::internal::testing
