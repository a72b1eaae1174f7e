// Attention with the bits of the CPU: the same choice of a kernel, and the CPU's flash kernel behind the operators that
// PyTorch has for other accelerators.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <array>
#include <tuple>

#include "tests/device/sim/kernels.h"

namespace penstock::sim {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::int64_t choose_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const OptionalTensor& mask, double dropout, bool is_causal, std::optional<double> scale,
                           bool enable_gqa) {
  const std::int64_t on_cpu =
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  if (on_cpu != static_cast<std::int64_t>(at::SDPBackend::flash_attention)) return on_cpu;
  return static_cast<std::int64_t>(at::SDPBackend::overrideable);
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                           at::Tensor, at::Tensor>;

Forward forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& mask,
                double dropout, bool is_causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  torch::jit::Stack stack{query, key, value, dropout, is_causal, mask, scale};
  run_on_stream("aten::_scaled_dot_product_flash_attention_for_cpu", "", stack);
  const at::Tensor none = at::empty({0}, query.options().dtype(at::kLong));
  return {stack[0].toTensor(), stack[1].toTensor(), none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask, std::array<bool, 4> /*wanted*/, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& /*cumulative_q*/, const at::Tensor& /*cumulative_k*/, std::int64_t /*max_q*/,
    std::int64_t /*max_k*/, double dropout, bool is_causal, const at::Tensor& /*seed*/, const at::Tensor& /*offset*/,
    std::optional<double> scale) {
  torch::jit::Stack stack{
      grad, query, key, value, out, logsumexp, dropout, is_causal, mask.defined() ? c10::IValue(mask) : c10::IValue(),
      scale};
  run_on_stream("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), at::Tensor()};
}

}  // namespace

void register_attention(torch::Library& library) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_kernel);
  library.impl("_scaled_dot_product_fused_attention_overrideable", forward);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward);
}

}  // namespace penstock::sim
