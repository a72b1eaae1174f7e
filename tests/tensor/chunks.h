// Fixtures for the tests of microbatches.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "penstock/tensor/microbatch.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

// Sets the debug mode of splitting in a scope.
class DebugMask {
 public:
  explicit DebugMask(bool on) : before_(debug_mask_minibatches()) { set_debug_mask_minibatches(on); }
  ~DebugMask() { set_debug_mask_minibatches(before_); }
  DebugMask(const DebugMask&) = delete;
  DebugMask& operator=(const DebugMask&) = delete;

 private:
  bool before_;
};

inline Args args_of(const c10::IValue& tuple) {
  return tuple.toTupleRef().elements().vec();
}
inline Kwargs kwargs_of(const c10::IValue& dict) {
  Kwargs kwargs;
  for (const auto& item : dict.toGenericDict()) kwargs.emplace(item.key().toStringRef(), item.value());
  return kwargs;
}
inline std::vector<c10::IValue> values_of(const std::vector<Args>& chunks) {
  std::vector<c10::IValue> values;
  for (const Args& chunk : chunks) values.push_back(to_value(chunk));
  return values;
}
inline std::vector<c10::IValue> values_of(const std::vector<Kwargs>& chunks) {
  std::vector<c10::IValue> values;
  for (const Kwargs& chunk : chunks) values.push_back(to_value(chunk));
  return values;
}

inline const c10::IValue& rows() {
  static const c10::IValue kSpec = TensorChunkSpec(0);
  return kSpec;
}
inline const c10::IValue& columns() {
  static const c10::IValue kSpec = TensorChunkSpec(1);
  return kSpec;
}
inline const c10::IValue& replicate() {
  static const c10::IValue kSpec = Replicate();
  return kSpec;
}

}  // namespace penstock::internal::testing
