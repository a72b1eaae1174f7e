// Metadata of tensors: describes the inputs and outputs that a stage expects, is compared with those that it receives,
// and is sent ahead of the data in a compact encoding.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

// Thrown when an input or output of a stage differs from its expected metadata. The message says where and what
// differs.
class PipeliningShapeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// All properties of a tensor but its values.
struct TensorMeta {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype = at::ScalarType::Float;
  at::Device device = at::kCPU;
  bool requires_grad = false;

  explicit TensorMeta(const at::Tensor& tensor);
  TensorMeta(std::vector<std::int64_t> sizes, std::vector<std::int64_t> steps, at::ScalarType type, at::Device on,
             bool grad)
      : shape(std::move(sizes)), strides(std::move(steps)), dtype(type), device(on), requires_grad(grad) {}

  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

// Returns "float32[2, 3]", followed by strides, device and requires_grad if they are not the default.
std::string to_string(const TensorMeta& meta);

// Returns the metadata of a value's leaves, in order, with nullopt for a leaf that is not a tensor.
std::vector<std::optional<TensorMeta>> extract_tensor_metas(const c10::IValue& value);

// Returns the differences in shape, strides and dtype, one sentence each. Does not compare device and requires_grad,
// which change when a tensor is sent from stage to stage.
std::vector<std::string> metadata_differences(const TensorMeta& expected, const TensorMeta& found);

// Throws PipeliningShapeError if there are differences. `what` names the tensor in the message, such as "stage 2, input
// 0".
void validate_tensor_metadata(std::string_view what, const TensorMeta& expected, const TensorMeta& found);
// Does the same for lists of the same length, with nullopt where there is no tensor.
void validate_tensors_metadata(std::string_view what, std::span<const std::optional<TensorMeta>> expected,
                               std::span<const std::optional<TensorMeta>> found);

// Returns a compact encoding that begins with a version. A contiguous tensor of few dimensions takes about ten bytes.
std::string encode_metadata(std::span<const std::optional<TensorMeta>> metas);
// Reverses encode_metadata. Throws PipeliningShapeError if the bytes are damaged or have another version.
std::vector<std::optional<TensorMeta>> decode_metadata(std::string_view bytes);

}  // namespace penstock
