#include "penstock/tensor/mask_mod.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

namespace penstock {
namespace {

at::TensorOptions bool_on(const at::Tensor& like) {
  return at::TensorOptions(at::kBool).device(like.device());
}

void check_all_callable(const char* function, const std::vector<MaskMod>& mask_mods) {
  for (std::size_t i = 0; i < mask_mods.size(); ++i) {
    if (!mask_mods[i]) {
      throw BlockMaskError(std::string(function) + ": mask function " + std::to_string(i) + " of " +
                           std::to_string(mask_mods.size()) + " is empty; each should be callable.");
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

at::Tensor ask_mask_mod(const MaskMod& mask_mod, const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                        const at::Tensor& kv_idx) {
  at::Tensor allowed = mask_mod(b.view({-1, 1, 1, 1}), h.view({-1, 1, 1}), q_idx.view({-1, 1}), kv_idx.view({-1}));
  const std::int64_t whole[] = {b.numel(), h.numel(), q_idx.numel(), kv_idx.numel()};
  std::ostringstream problem;
  if (!allowed.defined()) {
    problem << "an undefined tensor";
  } else if (allowed.scalar_type() != at::kBool) {
    problem << "a tensor of " << allowed.scalar_type();
  } else if (!broadcasts_to(allowed.sizes(), whole)) {
    problem << "a tensor of shape " << allowed.sizes();
  } else {
    while (allowed.dim() < 4) allowed = allowed.unsqueeze(0);
    return allowed;
  }
  throw BlockMaskError("mask_mod gave " + problem.str() + " for indices of shape " +
                       (std::ostringstream() << at::IntArrayRef(whole)).str() +
                       "; it should give a bool tensor that broadcasts to that shape.");
}

at::Tensor create_mask(const MaskMod& mask_mod, std::int64_t batch, std::int64_t heads, std::int64_t q_len,
                       std::int64_t kv_len, at::Device device) {
  const auto indices = [device](std::int64_t count) {
    return at::arange(count, at::TensorOptions(at::kLong).device(device));
  };
  return ask_mask_mod(mask_mod, indices(batch), indices(heads), indices(q_len), indices(kv_len))
      .expand({batch, heads, q_len, kv_len})
      .contiguous();
}

}  // namespace penstock
