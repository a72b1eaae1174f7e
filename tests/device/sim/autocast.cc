// Autocast of the device's own type, with the lists of operators that CUDA uses.
#include <ATen/autocast_mode.h>

#include "tests/device/sim/kernels.h"

namespace penstock::sim {
namespace {

at::Tensor binary_cross_entropy_banned(const at::Tensor& /*input*/, const at::Tensor& /*target*/,
                                       const std::optional<at::Tensor>& /*weight*/, std::int64_t /*reduction*/) {
  TORCH_CHECK(false,
              "binary_cross_entropy is unsafe to autocast.\n  Hint: use binary_cross_entropy_with_logits without a "
              "preceding sigmoid.");
}

}  // namespace

// PyTorch's macros expect the library under this name, and these types.
void register_autocast(torch::Library& m) {
  using at::IntArrayRef;
  using at::Scalar;
  using at::ScalarType;
  using at::Tensor;
#define PENSTOCK_CAST(POLICY, ...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, POLICY)
#define PENSTOCK_LOWER_PRECISION(...) PENSTOCK_CAST(lower_precision_fp, __VA_ARGS__)
#define PENSTOCK_FP32(...) PENSTOCK_CAST(fp32, __VA_ARGS__)
#define PENSTOCK_FP32_SET_OPT_DTYPE(...) PENSTOCK_CAST(fp32_set_opt_dtype, __VA_ARGS__)
#define PENSTOCK_PROMOTE(...) PENSTOCK_CAST(promote, __VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(PENSTOCK_LOWER_PRECISION)
  AT_FORALL_FP32(PENSTOCK_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(PENSTOCK_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PENSTOCK_PROMOTE)
#undef PENSTOCK_CAST
#undef PENSTOCK_LOWER_PRECISION
#undef PENSTOCK_FP32
#undef PENSTOCK_FP32_SET_OPT_DTYPE
#undef PENSTOCK_PROMOTE
  m.impl("binary_cross_entropy", binary_cross_entropy_banned);
}

}  // namespace penstock::sim
