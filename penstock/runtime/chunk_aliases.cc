#include "penstock/runtime/chunk_aliases.h"

#include <unordered_set>

#include "penstock/stage/copy_on_write.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {

void alias_chunks(std::vector<Batch>& parts, const Batch& batch) {
  std::unordered_set<const void*> replicated;
  const auto add = [&](const c10::IValue& value) {
    for (const at::Tensor& tensor : extract_tensor_args(value)) replicated.insert(tensor.unsafeGetTensorImpl());
  };
  add(to_value(batch.args));
  for (const auto& [stage, kwargs] : batch.kwargs) add(to_value(kwargs));
  add(batch.target);

  const auto alias_all = [&](c10::IValue& value) {
    value = map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
      if (!leaf.isTensor() || !leaf.toTensor().defined()) return leaf;
      const at::Tensor& tensor = leaf.toTensor();
      return replicated.contains(tensor.unsafeGetTensorImpl()) ? tensor : copy_on_write_chunk(tensor);
    });
  };
  for (Batch& part : parts) {
    for (c10::IValue& arg : part.args) alias_all(arg);
    for (auto& [stage, kwargs] : part.kwargs) {
      for (auto& [name, value] : kwargs) alias_all(value);
    }
    alias_all(part.target);
  }
}

}  // namespace penstock::internal
