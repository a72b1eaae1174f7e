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

// Reads the tensors of one index, and the records that contain them.
void read_index(const Archive& archive, const std::string& folder, const std::string& index,
                std::map<std::string, at::Tensor>& weights, std::map<std::string, at::Tensor>& records) {
  const std::string record = folder + index;
  if (!archive.contains(record)) return;
  const std::string where = archive.name() + ": " + record;
  const json parsed = parse_exported_json(archive.text(record), where);
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
        weights[name] = known->second;
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
      at::Tensor& file = records[folder + payload.get_path_name()];
      if (!file.defined()) file = archive.bytes(folder + payload.get_path_name());
      const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
      if (!lies_within(sizes, strides, offset, element, file.numel())) {
        throw ProgramError(concat("is not inside the ", file.numel(), " bytes of ", payload.get_path_name(), "."));
      }
      at::Tensor tensor = at::empty({0}, dtype).set_(file.storage(), offset, sizes, strides);
      if (meta.get_requires_grad()) tensor.requires_grad_();
      weights[name] = tensor;
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

}  // namespace

std::map<std::string, at::Tensor> read_weights(const Archive& archive, std::map<std::string, at::Tensor>* records) {
  const std::string model = model_name(archive);
  std::map<std::string, at::Tensor> weights;
  std::map<std::string, at::Tensor> read;
  read_index(archive, "data/weights/", model + "_weights_config.json", weights, read);
  read_index(archive, "data/constants/", model + "_constants_config.json", weights, read);
  if (records != nullptr) *records = std::move(read);
  return weights;
}

}  // namespace penstock::internal
