#include "penstock/program/reader/weights.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/json.h"
#include "penstock/program/reader/schema.h"
#include "penstock/tensor/state_dict.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

// Returns true if all elements of a tensor are inside a storage of `bytes` bytes.
bool lies_within(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides, std::int64_t offset,
                 std::int64_t element, std::int64_t bytes) {
  if (offset < 0 || sizes.size() != strides.size()) return false;
  const auto is_negative = [](std::int64_t number) { return number < 0; };
  if (std::ranges::any_of(sizes, is_negative) || std::ranges::any_of(strides, is_negative)) return false;
  if (std::ranges::find(sizes, 0) != sizes.end()) return true;
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last)) {
      return false;
    }
  }
  std::int64_t end = 0;
  return !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, element, &end) && end <= bytes;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

Weights::Weights(std::shared_ptr<const Archive> archive) : archive_(std::move(archive)) {
  const std::string model = model_name(*archive_);
  read_index("data/weights/", model + "_weights_config.json");
  read_index("data/constants/", model + "_constants_config.json");
  if (!archive_->is_file()) load_all();
}

// Reads the tensors of one index.
void Weights::read_index(const std::string& folder, const std::string& index) {
  const std::string record = folder + index;
  if (!archive_->contains(record)) return;
  const std::string where = archive_->name() + ": " + record;
  const json parsed = parse_exported_json(archive_->text(record), where);
  // Tensors by file and metadata. Entries that agree in both are tied.
  std::map<std::pair<std::string, std::string>, at::Tensor> tensors;
  if (!parsed.is_object() || !parsed.contains("config") || !parsed["config"].is_object()) {
    throw ProgramError(concat(where, ": should have a config."));
  }
  for (const auto& [name, described] : parsed["config"].items()) {
    const std::string place = concat(where, ", '", name, "'");
    try {
      const auto payload = described.get<schema::PayloadMeta>();
      if (payload.get_use_pickle() || !payload.get_tensor_meta()) {
        throw ProgramError(
            "is a pickled Python object, which could run code when it is loaded; only plain tensors are supported.");
      }
      const auto key = std::pair(payload.get_path_name(), described.dump());
      if (const auto known = tensors.find(key); known != tensors.end()) {
        by_name_[name] = known->second;
        continue;
      }
      const schema::TensorMeta& meta = *payload.get_tensor_meta();
      if (layout_of(meta.get_layout()) != at::Layout::Strided) throw ProgramError("is not a strided tensor.");
      std::vector<std::int64_t> sizes;
      std::vector<std::int64_t> strides;
      for (const schema::SymInt& size : meta.get_sizes()) sizes.push_back(static_size(size));
      for (const schema::SymInt& stride : meta.get_strides()) strides.push_back(static_size(stride));
      const std::int64_t offset = static_size(meta.get_storage_offset());
      const at::ScalarType dtype = dtype_of(meta.get_dtype());
      const at::Tensor bytes = record_bytes(folder + payload.get_path_name());
      const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
      if (!lies_within(sizes, strides, offset, element, bytes.numel())) {
        throw ProgramError(concat("is not inside the ", bytes.numel(), " bytes of ", payload.get_path_name(), "."));
      }
      at::Tensor tensor = at::empty({0}, dtype).set_(bytes.storage(), offset, sizes, strides);
      if (meta.get_requires_grad()) tensor.requires_grad_();
      by_name_[name] = tensor;
      tensors.emplace(key, std::move(tensor));
    } catch (const ProgramError& error) {
      throw ProgramError(concat(place, ": ", error.what()));
    } catch (const c10::Error& error) {
      throw ProgramError(concat(place, ": ", error.what_without_backtrace()));
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      throw ProgramError(concat(place, ": does not match the schema: ", error.what()));
    }
  }
}

at::Tensor Weights::record_bytes(const std::string& record) {
  at::Tensor& bytes = records_[record];
  if (bytes.defined()) return bytes;
  bytes = Archive::view_bytes(archive_, record);
  // Elements of every dtype can be read at a multiple of 16.
  constexpr std::uintptr_t kAlignment = 16;
  if (reinterpret_cast<std::uintptr_t>(bytes.const_data_ptr()) % kAlignment != 0) {
    bytes = archive_->bytes(record);
  } else {
    const MutexLock lock(mutex_);
    unloaded_.emplace(storage_of(bytes), Unloaded{.bytes = bytes, .record = record, .replaced = {}});
  }
  return bytes;
}

void Weights::load_storage(const void* storage) {
  const auto found = unloaded_.find(storage);
  if (found == unloaded_.end()) return;
  const Unloaded& unloaded = found->second;
  const std::vector<std::pair<at::Tensor, at::Tensor>>& replaced = unloaded.replaced;
  // A tensor that covers its storage needs nothing of the file.
  const bool is_covered = replaced.size() == 1 && replaced.front().first.is_non_overlapping_and_dense() &&
                          replaced.front().first.nbytes() == unloaded.bytes.nbytes();
  const at::Tensor loaded =
      is_covered ? at::empty({unloaded.bytes.numel()}, at::kByte) : archive_->bytes(unloaded.record);
  c10::StorageImpl& source = *loaded.storage().unsafeGetStorageImpl();
  c10::StorageImpl& target = *unloaded.bytes.storage().unsafeGetStorageImpl();
  // From now on it is a storage like any other, which can be freed and allocated again, as shards are.
  target.set_allocator(source.allocator());
  target.set_resizable(true);
  target.set_data_ptr_noswap(source.set_data_ptr(c10::DataPtr()));
  for (const auto& [tensor, values] : replaced) load_tensor(tensor, values);
  unloaded_.erase(found);
  has_unloaded_ = !unloaded_.empty();
}

void Weights::load(const at::Tensor& tensor) {
  if (!has_unloaded_) return;
  const MutexLock lock(mutex_);
  load_storage(storage_of(tensor));
}

void Weights::load_all() {
  if (!has_unloaded_) return;
  const MutexLock lock(mutex_);
  // Copies that nobody has any more, such as those of another cut, are dropped.
  std::erase_if(unloaded_, [](const auto& entry) { return entry.second.bytes.storage().use_count() == 1; });
  while (!unloaded_.empty()) load_storage(unloaded_.begin()->first);
  has_unloaded_ = false;
}

bool Weights::is_loaded(const at::Tensor& tensor) const {
  const MutexLock lock(mutex_);
  return !unloaded_.contains(storage_of(tensor));
}

at::Tensor Weights::copy_of(const at::Tensor& tensor) {
  const MutexLock lock(mutex_);
  const auto found = unloaded_.find(storage_of(tensor));
  if (found == unloaded_.end()) return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  const Unloaded original = found->second;
  const at::Tensor bytes = Archive::view_bytes(archive_, original.record);
  at::Tensor copy = at::empty({0}, tensor.scalar_type())
                        .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  copy.set_requires_grad(tensor.requires_grad());
  Unloaded& unloaded = unloaded_[storage_of(bytes)] = {.bytes = bytes, .record = original.record, .replaced = {}};
  for (const auto& [other, values] : original.replaced) {
    if (other.is_same(tensor)) unloaded.replaced.emplace_back(copy, values);
  }
  return copy;
}

void Weights::replace(const at::Tensor& tensor, const at::Tensor& values) {
  const MutexLock lock(mutex_);
  const auto found = unloaded_.find(storage_of(tensor));
  if (found == unloaded_.end()) {
    load_tensor(tensor, values);
    return;
  }
  auto& replaced = found->second.replaced;
  std::erase_if(replaced, [&](const auto& pair) { return pair.first.is_same(tensor); });
  replaced.emplace_back(tensor, values);
}

std::map<std::string, at::Tensor> Weights::records() {
  load_all();
  return records_;
}

}  // namespace penstock::internal
