#include "penstock/program/reader/weights.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/json.h"
#include "penstock/program/reader/schema.h"
#include "penstock/tensor/identity.h"
#include "penstock/tensor/state_dict.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

// Returns the number of bytes from the beginning of a storage to the end of a tensor's last element; none for numbers
// that are no tensor's.
std::optional<std::int64_t> end_in_storage(const std::vector<std::int64_t>& sizes,
                                           const std::vector<std::int64_t>& strides, std::int64_t offset,
                                           std::int64_t element) {
  if (offset < 0 || sizes.size() != strides.size()) return std::nullopt;
  const auto is_negative = [](std::int64_t number) { return number < 0; };
  if (std::ranges::any_of(sizes, is_negative) || std::ranges::any_of(strides, is_negative)) return std::nullopt;
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last)) {
      return std::nullopt;
    }
  }
  std::int64_t end = 0;
  if (__builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, element, &end)) return std::nullopt;
  return end;
}

}  // namespace

Weights::Weights(std::shared_ptr<const Archive> archive) : archive_(std::move(archive)) {
  const std::string model = model_name(*archive_);
  read_index("data/weights/", model + "_weights_config.json");
  read_index("data/constants/", model + "_constants_config.json");
  if (archive_->is_file()) return;
  // The bytes may be freed.
  const MutexLock lock(mutex_);
  std::vector<const void*> storages;
  for (const auto& [storage, unloaded] : unloaded_) {
    if (!unloaded.uninitialised) storages.push_back(storage);
  }
  for (const void* storage : storages) load_storage(storage);
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
      // All tensors without values are in one record.
      const bool has_values =
          !payload.get_tensor_meta() || payload.get_tensor_meta()->get_device().get_type() != "meta";
      const auto key = std::pair(has_values ? payload.get_path_name() : name, described.dump());
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
      const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
      const std::optional<std::int64_t> end = end_in_storage(sizes, strides, offset, element);
      const at::Tensor bytes =
          has_values ? record_bytes(folder + payload.get_path_name()) : without_memory(end.value_or(0));
      if (!end || *end > bytes.numel()) {
        throw ProgramError(concat("is not inside the ", bytes.numel(), " bytes of ", payload.get_path_name(), "."));
      }
      at::Tensor tensor = at::empty({0}, dtype).set_(bytes.storage(), offset, sizes, strides);
      if (!has_values) {
        lacks_values_ = true;
        const MutexLock lock(mutex_);
        unloaded_.emplace(memory_of(bytes),
                          Unloaded{.bytes = bytes,
                                   .uninitialised = Uninitialised{.name = name,
                                                                  .geometry = at::TensorGeometry(tensor),
                                                                  .dtype = dtype,
                                                                  .requires_grad = meta.get_requires_grad()}});
      }
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
    unloaded_.emplace(memory_of(bytes), Unloaded{.bytes = bytes, .record = record});
  }
  return bytes;
}

at::Tensor Weights::without_memory(std::int64_t size) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size,
                                                             c10::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr,
                                                             /*resizable=*/false));
  return at::empty({0}, at::kByte).set_(std::move(storage), 0, {size}, {1});
}

void Weights::initialise(InitialValues values) {
  const MutexLock lock(mutex_);
  initial_values_ = std::move(values);
}

at::Tensor Weights::loaded_bytes(const Unloaded& unloaded) const {
  const auto& replaced = unloaded.replaced;
  // A tensor that covers its storage needs nothing of the file.
  const bool is_covered = replaced.size() == 1 && replaced.front().first.is_non_overlapping_and_dense() &&
                          replaced.front().first.nbytes() == unloaded.bytes.nbytes();
  if (!is_covered && !unloaded.uninitialised) return archive_->bytes(unloaded.record);
  const at::Tensor bytes = at::empty({unloaded.bytes.numel()}, at::kByte);
  if (is_covered) return bytes;
  const auto& [name, geometry, dtype, requires_grad] = *unloaded.uninitialised;
  if (!initial_values_) {
    throw ProgramError(concat(archive_->name(), ": '", name,
                              "' has no values: the model was exported on the meta device.\n  Hint: give the values of "
                              "all weights, or draw initial values with Program::initialise."));
  }
  at::Tensor values =
      at::empty({0}, dtype).set_(bytes.storage(), geometry.storage_offset(), geometry.sizes(), geometry.strides());
  values.set_requires_grad(requires_grad);
  initial_values_(name, values);
  return bytes;
}

void Weights::load_storage(const void* storage) {
  const auto found = unloaded_.find(storage);
  if (found == unloaded_.end()) return;
  const Unloaded& unloaded = found->second;
  const at::Tensor loaded = loaded_bytes(unloaded);
  c10::StorageImpl& source = *loaded.storage().unsafeGetStorageImpl();
  c10::StorageImpl& target = *unloaded.bytes.storage().unsafeGetStorageImpl();
  // From now on it is a storage like any other, which can be freed and allocated again, as shards are.
  target.set_allocator(source.allocator());
  target.set_resizable(true);
  target.set_data_ptr_noswap(source.set_data_ptr(c10::DataPtr()));
  for (const auto& [tensor, values] : unloaded.replaced) load_tensor(tensor, values);
  unloaded_.erase(found);
  has_unloaded_ = !unloaded_.empty();
}

void Weights::load(const at::Tensor& tensor) {
  if (!has_unloaded_) return;
  const MutexLock lock(mutex_);
  load_storage(memory_of(tensor));
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
  return !unloaded_.contains(memory_of(tensor));
}

at::Tensor Weights::copy_of(const at::Tensor& tensor) {
  const MutexLock lock(mutex_);
  const auto found = unloaded_.find(memory_of(tensor));
  if (found == unloaded_.end()) return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  const Unloaded original = found->second;
  const at::Tensor bytes =
      original.uninitialised ? without_memory(original.bytes.numel()) : Archive::view_bytes(archive_, original.record);
  at::Tensor copy = at::empty({0}, tensor.scalar_type())
                        .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  copy.set_requires_grad(tensor.requires_grad());
  Unloaded& unloaded = unloaded_[memory_of(bytes)] = {
      .bytes = bytes, .record = original.record, .uninitialised = original.uninitialised};
  for (const auto& [other, values] : original.replaced) {
    if (other.is_same(tensor)) unloaded.replaced.emplace_back(copy, values);
  }
  return copy;
}

void Weights::replace(const at::Tensor& tensor, const at::Tensor& values) {
  const MutexLock lock(mutex_);
  const auto found = unloaded_.find(memory_of(tensor));
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
