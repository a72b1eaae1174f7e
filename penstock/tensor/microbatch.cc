#include "penstock/tensor/microbatch.h"

#include <ATen/core/Dict.h>
#include <ATen/core/jit_type.h>

#include <atomic>

namespace penstock {
namespace {

std::atomic<bool> mask_minibatches = false;

}  // namespace

void set_debug_mask_minibatches(bool on) {
  mask_minibatches = on;
}
bool debug_mask_minibatches() {
  return mask_minibatches;
}

c10::IValue to_value(const Args& args) {
  return c10::ivalue::Tuple::create(args);
}
c10::IValue to_value(const Kwargs& kwargs) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : kwargs) dict.insert(name, value);
  return dict;
}

}  // namespace penstock
