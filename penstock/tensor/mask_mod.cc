#include "penstock/tensor/mask_mod.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "penstock/base/text.h"

namespace penstock {

using internal::concat;
using internal::shape_text;

namespace {

at::TensorOptions bool_on(const at::Tensor& like) {
  return at::TensorOptions(at::kBool).device(like.device());
}

void check_all_callable(const char* function, const std::vector<MaskMod>& mask_mods) {
  for (std::size_t i = 0; i < mask_mods.size(); ++i) {
    if (!mask_mods[i]) {
      throw BlockMaskError(
          concat(function, ": mask function ", i, " of ", mask_mods.size(), " is empty; each should be callable."));
    }
  }
}

bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  const std::size_t missing = to.size() - from.size();
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != to[missing + i]) return false;
  }
  return true;
}

}  // namespace

at::Tensor noop_mask(const at::Tensor& b, const at::Tensor& /*h*/, const at::Tensor& /*q_idx*/,
                     const at::Tensor& /*kv_idx*/) {
  return at::ones({}, bool_on(b));
}

MaskMod and_masks(std::vector<MaskMod> mask_mods) {
  check_all_callable("and_masks", mask_mods);
  return [mods = std::move(mask_mods)](const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                                       const at::Tensor& kv_idx) {
    at::Tensor allowed = at::ones({}, bool_on(b));
    for (const MaskMod& mod : mods) allowed = allowed.logical_and(mod(b, h, q_idx, kv_idx));
    return allowed;
  };
}

MaskMod or_masks(std::vector<MaskMod> mask_mods) {
  check_all_callable("or_masks", mask_mods);
  return [mods = std::move(mask_mods)](const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                                       const at::Tensor& kv_idx) {
    at::Tensor allowed = at::zeros({}, bool_on(b));
    for (const MaskMod& mod : mods) allowed = allowed.logical_or(mod(b, h, q_idx, kv_idx));
    return allowed;
  };
}

at::Tensor evaluate_mask_mod(const MaskMod& mask_mod, const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                             const at::Tensor& kv_idx) {
  at::Tensor allowed = mask_mod(b.view({-1, 1, 1, 1}), h.view({-1, 1, 1}), q_idx.view({-1, 1}), kv_idx.view({-1}));
  const std::array<std::int64_t, 4> shape = {b.numel(), h.numel(), q_idx.numel(), kv_idx.numel()};
  std::string found;
  if (!allowed.defined()) {
    found = "an undefined tensor";
  } else if (allowed.scalar_type() != at::kBool) {
    found = concat("a tensor of ", c10::toString(allowed.scalar_type()));
  } else if (!broadcasts_to(allowed.sizes(), shape)) {
    found = concat("a tensor of shape ", shape_text(allowed.sizes()));
  } else {
    while (allowed.dim() < 4) allowed = allowed.unsqueeze(0);
    return allowed;
  }
  throw BlockMaskError(concat("mask_mod returned ", found, " for indices of shape ", shape_text(shape),
                              "; it should return a bool tensor that broadcasts to that shape."));
}

at::Tensor create_mask(const MaskMod& mask_mod, std::int64_t batch, std::int64_t heads, std::int64_t q_len,
                       std::int64_t kv_len, at::Device device) {
  const auto indices = [device](std::int64_t count) {
    return at::arange(count, at::TensorOptions(at::kLong).device(device));
  };
  return evaluate_mask_mod(mask_mod, indices(batch), indices(heads), indices(q_len), indices(kv_len))
      .expand({batch, heads, q_len, kv_len})
      .contiguous();
}

}  // namespace penstock
