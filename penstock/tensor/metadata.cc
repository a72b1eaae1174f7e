#include "penstock/tensor/metadata.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/tensor_text.h"

namespace penstock {

using internal::concat;
using internal::join;
using internal::shape_text;
using internal::TextPart;
using internal::type_text;

namespace {

constexpr std::uint8_t kVersion = 1;

// Flags before each tensor in the encoded form; 0 for an absent tensor.
enum Flag : std::uint8_t { kPresent = 1, kRequiresGrad = 2, kContiguous = 4, kAllFlags = 7 };

// Returns the strides of a contiguous tensor, or nothing if its number of elements overflows 64 bits.
std::optional<std::vector<std::int64_t>> contiguous_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    if (__builtin_mul_overflow(step, std::max<std::int64_t>(shape[i], 1), &step)) return std::nullopt;
  }
  return strides;
}

bool is_contiguous(const TensorMeta& meta) {
  return contiguous_strides(meta.shape) == meta.strides;
}

void append_byte(std::string& out, std::uint64_t value) {
  out += static_cast<char>(value);
}

// Appends a variable-length integer (LEB128): seven bits in a byte, the eighth set in all but the last.
void append_number(std::string& out, std::int64_t number) {
  auto value = static_cast<std::uint64_t>(number);
  for (; value >= 0x80; value >>= 7) append_byte(out, (value & 0x7F) | 0x80);
  append_byte(out, value);
}

class MetadataReader {
 public:
  explicit MetadataReader(std::string_view bytes) : rest_(bytes) {}

  std::vector<std::optional<TensorMeta>> read() {
    const unsigned version = byte();
    if (version != kVersion) fail("its version is ", version, ", expected ", kVersion);
    const std::size_t count = count_of("tensors");
    std::vector<std::optional<TensorMeta>> metas;
    metas.reserve(count);
    for (std::size_t i = 0; i < count; ++i) metas.push_back(meta());
    if (!rest_.empty()) fail(rest_.size(), " bytes follow its end");
    return metas;
  }

 private:
  template <TextPart... Parts>
  [[noreturn]] static void fail(const Parts&... problem) {
    throw PipeliningShapeError(concat("the metadata of a message is damaged: ", problem..., "."));
  }

  std::optional<TensorMeta> meta() {
    const unsigned flags = byte();
    if (flags == 0) return std::nullopt;
    if (flags > kAllFlags || (flags & kPresent) == 0) fail("a tensor has flags ", flags);
    const unsigned dtype = byte();
    if (dtype >= static_cast<unsigned>(at::ScalarType::Undefined)) fail("there is no dtype ", dtype);
    const at::Device on = device();
    const std::size_t dims = count_of("dimensions");
    std::vector<std::int64_t> shape = numbers(dims);
    const auto contiguous = contiguous_strides(shape);
    if (!contiguous) fail("a tensor of shape ", shape_text(shape), " is too large");
    std::vector<std::int64_t> strides = (flags & kContiguous) != 0 ? *contiguous : numbers(dims);
    return TensorMeta(std::move(shape), std::move(strides), static_cast<at::ScalarType>(dtype), on,
                      (flags & kRequiresGrad) != 0);
  }

  at::Device device() {
    const unsigned kind = byte();
    if (kind >= static_cast<unsigned>(at::COMPILE_TIME_MAX_DEVICE_TYPES)) {
      fail("there is no device of kind ", kind);
    }
    const auto type = static_cast<at::DeviceType>(kind);
    const int index = static_cast<int>(byte()) - 1;
    if (index > (type == at::DeviceType::CPU ? 0 : std::numeric_limits<at::DeviceIndex>::max())) {
      fail("there is no device ", at::DeviceTypeName(type, true), ":", index);
    }
    return {type, static_cast<at::DeviceIndex>(index)};
  }

  // Reads the number of elements of a list. Each takes at least a byte, which bounds the memory that a damaged number
  // can make the reader allocate.
  std::size_t count_of(const char* elements) {
    const auto count = static_cast<std::size_t>(number());
    if (count > rest_.size()) {
      fail("it promises ", count, " ", elements, " in ", rest_.size(), " bytes");
    }
    return count;
  }

  std::vector<std::int64_t> numbers(std::size_t count) {
    std::vector<std::int64_t> result(count);
    std::generate(result.begin(), result.end(), [&] { return number(); });
    return result;
  }

  unsigned byte() {
    if (rest_.empty()) fail("it ends too early");
    const auto value = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }

  std::int64_t number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 63; shift += 7) {
      const unsigned next = byte();
      value |= static_cast<std::uint64_t>(next & 0x7F) << shift;
      if ((next & 0x80) == 0) return static_cast<std::int64_t>(value);
    }
    fail("a number does not end");
  }

  std::string_view rest_;
};

}  // namespace

TensorMeta::TensorMeta(const at::Tensor& tensor)
    : shape(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      dtype(tensor.scalar_type()),
      device(tensor.device()),
      requires_grad(tensor.requires_grad()) {}

std::string to_string(const TensorMeta& meta) {
  std::string text = type_text(meta.dtype, meta.shape);
  if (!is_contiguous(meta)) text += " with strides " + shape_text(meta.strides);
  if (!meta.device.is_cpu()) text += " on " + meta.device.str();
  if (meta.requires_grad) text += ", requires grad";
  return text;
}

std::vector<std::optional<TensorMeta>> extract_tensor_metas(const c10::IValue& value) {
  std::vector<std::optional<TensorMeta>> metas;
  for_each_leaf(value, Path("value"), [&](const c10::IValue& leaf, const Path&) {
    if (leaf.isTensor() && leaf.toTensor().defined()) {
      metas.emplace_back(TensorMeta(leaf.toTensor()));
    } else {
      metas.emplace_back(std::nullopt);
    }
  });
  return metas;
}

std::vector<std::string> metadata_differences(const TensorMeta& expected, const TensorMeta& found) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* property, const std::string& wanted, const std::string& actual) {
    if (wanted != actual) differences.push_back(concat("its ", property, " is ", actual, ", expected ", wanted));
  };
  compare("shape", shape_text(expected.shape), shape_text(found.shape));
  compare("stride", shape_text(expected.strides), shape_text(found.strides));
  compare("dtype", dtype_name(expected.dtype), dtype_name(found.dtype));
  return differences;
}

void validate_tensor_metadata(std::string_view what, const TensorMeta& expected, const TensorMeta& found) {
  const std::vector<std::string> differences = metadata_differences(expected, found);
  if (!differences.empty()) throw PipeliningShapeError(concat(what, ": ", join(differences, "; "), "."));
}

void validate_tensors_metadata(std::string_view what, std::span<const std::optional<TensorMeta>> expected,
                               std::span<const std::optional<TensorMeta>> found) {
  if (expected.size() != found.size()) {
    throw PipeliningShapeError(concat(what, ": there are ", found.size(), " tensors, expected ", expected.size(), "."));
  }
  const auto text = [](const std::optional<TensorMeta>& meta) { return meta ? to_string(*meta) : "None"; };
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::string name = concat(what, "[", i, "]");
    if (expected[i] && found[i]) {
      validate_tensor_metadata(name, *expected[i], *found[i]);
    } else if (expected[i] || found[i]) {
      throw PipeliningShapeError(concat(name, ": it is ", text(found[i]), ", expected ", text(expected[i]), "."));
    }
  }
}

std::string encode_metadata(std::span<const std::optional<TensorMeta>> metas) {
  std::string out;
  append_byte(out, kVersion);
  append_number(out, static_cast<std::int64_t>(metas.size()));
  for (const auto& meta : metas) {
    if (!meta) {
      append_byte(out, 0);
      continue;
    }
    const bool contiguous = is_contiguous(*meta);
    std::uint8_t flags = kPresent;
    if (meta->requires_grad) flags |= kRequiresGrad;
    if (contiguous) flags |= kContiguous;
    append_byte(out, flags);
    append_byte(out, static_cast<std::uint64_t>(meta->dtype));
    append_byte(out, static_cast<std::uint64_t>(meta->device.type()));
    append_byte(out, static_cast<std::uint64_t>(meta->device.index() + 1));
    append_number(out, static_cast<std::int64_t>(meta->shape.size()));
    for (const std::int64_t size : meta->shape) append_number(out, size);
    if (contiguous) continue;
    for (const std::int64_t stride : meta->strides) append_number(out, stride);
  }
  return out;
}

std::vector<std::optional<TensorMeta>> decode_metadata(std::string_view bytes) {
  return MetadataReader(bytes).read();
}

}  // namespace penstock
