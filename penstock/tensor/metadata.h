// Metadata of tensors: what a stage expects at its borders, compared with what comes, printed in errors, and sent ahead
// of the data in a compact form.
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

// Tensors at a border that are not what was expected. The message says where and what differs.
class PipeliningShapeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

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

// "float32[2, 3]", with strides, device and requires_grad where they are not the usual ones.
std::string to_string(const TensorMeta& meta);

// The metadata of a value's leaves, in order; none for what is no tensor.
std::vector<std::optional<TensorMeta>> extract_tensor_metas(const c10::IValue& value);

// How the shape, strides and dtype differ, a sentence each. Neither device nor requires_grad counts: a tensor changes
// both when it goes from stage to stage.
std::vector<std::string> metadata_differences(const TensorMeta& expected, const TensorMeta& found);

// Throws PipeliningShapeError unless the two agree; `what` names the tensor, such as "stage 2, input 0".
void validate_tensor_metadata(std::string_view what, const TensorMeta& expected, const TensorMeta& found);
// The same for a list, with None where there is no tensor.
void validate_tensors_metadata(std::string_view what, std::span<const std::optional<TensorMeta>> expected,
                               std::span<const std::optional<TensorMeta>> found);

// A compact form for sending, with a version in front: a contiguous tensor of few dimensions takes about ten bytes.
std::string encode_metadata(std::span<const std::optional<TensorMeta>> metas);
// Throws PipeliningShapeError when the bytes say nothing of the kind, or are of another version.
std::vector<std::optional<TensorMeta>> decode_metadata(std::string_view bytes);

}  // namespace penstock
