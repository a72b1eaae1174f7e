#include "penstock/tensor/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/tensor_text.h"

namespace penstock::internal {
namespace {

using Found = std::map<std::string, at::Tensor>;

// Compares bitwise, so that NaN equals itself. Both tensors have the same dtype and shape.
bool bitwise_identical(const at::Tensor& first, const at::Tensor& second) {
  // Tensors of a mapped file are not read without need.
  if (first.is_same(second)) return true;
  const at::Tensor left = first.detach().contiguous();
  const at::Tensor right = second.detach().contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// Returns the value of the first name that a file has, or null if it has none of them.
const at::Tensor* find_value(const ModelTensor& model, const Found& found) {
  for (const std::string& name : model.names) {
    if (const auto value = found.find(name); value != found.end()) return &value->second;
  }
  return nullptr;
}

bool repeats_memory(const at::Tensor& tensor, std::int64_t dim) {
  return tensor.stride(dim) == 0 && tensor.size(dim) > 1;
}

// Tensors of the model that share a storage, with the values for them.
struct StorageGroup {
  std::vector<std::pair<const ModelTensor*, const at::Tensor*>> members;

  // Returns false if every element has its own memory, so that no two values can contradict each other.
  bool shares_memory() const {
    if (members.size() > 1) return true;
    const at::Tensor& tensor = members.front().first->tensor;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (repeats_memory(tensor, dim)) return true;
    }
    return false;
  }

  // Copies all values into a copy of the storage, and returns the names of those that were overwritten by others.
  std::vector<std::string> contradictions() const {
    const at::NoGradGuard no_grad;
    const c10::Storage& storage = members.front().first->tensor.storage();
    const at::Tensor scratch = at::empty({static_cast<std::int64_t>(storage.nbytes())}, at::kByte);
    if (storage.nbytes() > 0) std::memcpy(scratch.mutable_data_ptr(), storage.data(), storage.nbytes());
    std::vector<at::Tensor> copies;
    for (const auto& [model, value] : members) {
      const at::Tensor& tensor = model->tensor;
      copies.push_back(at::empty({0}, tensor.scalar_type())
                           .set_(scratch.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides()));
      load_tensor(copies.back(), *value);
    }
    std::vector<std::string> names;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (!bitwise_identical(copies[i], *members[i].second)) names.push_back(members[i].first->names.front());
    }
    return names;
  }
};

// Differences of one kind.
struct Differences {
  // End of the sentence "… and 3 more ".
  const char* rest = "";
  std::vector<std::string> lines = {};

  // Adds at most `most` lines to the text.
  void write(std::string& text, std::size_t most) const {
    const std::size_t shown = lines.size() <= most ? lines.size() : most - 1;
    for (std::size_t i = 0; i < shown; ++i) text += (text.empty() ? "  " : "\n  ") + lines[i];
    if (shown == lines.size()) return;
    text += (text.empty() ? "  … and " : "\n  … and ") + std::to_string(lines.size() - shown) + " more " + rest + ".";
  }
};

}  // namespace

std::string state_differences(const std::vector<ModelTensor>& model, const Found& found) {
  Differences mismatched{.rest = "have another shape or dtype"};
  Differences missing{.rest = "are missing"};
  Differences unexpected{.rest = "are unexpected"};
  Differences contradictory{.rest = "contradict each other"};
  std::set<std::string_view> known;
  std::map<const void*, StorageGroup> storages;
  for (const ModelTensor& expected : model) {
    known.insert(expected.names.begin(), expected.names.end());
    const at::Tensor* const value = find_value(expected, found);
    if (value == nullptr) {
      if (expected.is_required) {
        missing.lines.push_back(concat(quoted_tensor(expected.names.front()), " is missing: the model has ",
                                       type_text(expected.tensor), "."));
      }
      continue;
    }
    bool fits = true;
    for (const std::string& name : expected.names) {
      const auto other = found.find(name);
      if (other == found.end()) continue;
      if (other->second.scalar_type() != expected.tensor.scalar_type() ||
          other->second.sizes() != expected.tensor.sizes()) {
        mismatched.lines.push_back(concat(quoted_tensor(name), ": found ", type_text(other->second), ", expected ",
                                          type_text(expected.tensor), "."));
        fits = false;
      } else if (fits && !bitwise_identical(other->second, *value)) {
        contradictory.lines.push_back(concat(quoted_tensor(name), " is tied to ", quoted_tensor(expected.names.front()),
                                             " in the model, and has other values."));
        fits = false;
      }
    }
    if (fits && expected.tensor.numel() > 0) {
      storages[expected.tensor.storage().unsafeGetStorageImpl()].members.emplace_back(&expected, value);
    }
  }
  for (const auto& [name, tensor] : found) {
    if (!known.contains(name)) {
      unexpected.lines.push_back(concat(quoted_tensor(name), " is unexpected: found ", type_text(tensor), "."));
    }
  }
  for (const auto& [storage, group] : storages) {
    if (!group.shares_memory()) continue;
    for (const std::string& name : group.contradictions()) {
      contradictory.lines.push_back(
          concat(quoted_tensor(name), " shares memory in the model, and its values contradict that."));
    }
  }
  constexpr std::size_t kMostLines = 10;
  const std::array kinds{&mismatched, &missing, &unexpected, &contradictory};
  std::size_t total = 0;
  std::size_t present = 0;
  for (const Differences* kind : kinds) {
    total += kind->lines.size();
    present += kind->lines.empty() ? 0 : 1;
  }
  std::string text;
  for (const Differences* kind : kinds) kind->write(text, total <= kMostLines ? kMostLines : kMostLines / present);
  return text;
}

void load_tensor(const at::Tensor& tensor, at::Tensor value) {
  const at::NoGradGuard no_grad;
  at::Tensor target = tensor.detach();
  for (std::int64_t dim = 0; dim < target.dim(); ++dim) {
    if (!repeats_memory(target, dim)) continue;
    target = target.narrow(dim, 0, 1);
    value = value.narrow(dim, 0, 1);
  }
  target.copy_(value);
  release_pages(value);
}

void load_state(const std::vector<ModelTensor>& model, const Found& found) {
  for (const ModelTensor& expected : model) {
    if (const at::Tensor* const value = find_value(expected, found)) load_tensor(expected.tensor, *value);
  }
}

}  // namespace penstock::internal
