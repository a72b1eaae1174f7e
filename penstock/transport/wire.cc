#include "penstock/transport/wire.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

// A c10d tag has 31 bits: 14 for the channel without its lowest bit, which selects the process group, 15 for the number
// and 2 for the kind.
constexpr std::uint32_t kLargest = (1U << 15U) - 1;

}  // namespace

void require_tag_within(Tag tag, std::uint32_t limit) {
  if (tag.channel <= limit && tag.number <= limit) return;
  throw std::invalid_argument(concat("a message has number ", tag.number, " in channel ", tag.channel,
                                     "; numbers and channels go from 0 to ", limit, "."));
}

int wire_tag(Tag tag, MessageKind kind) {
  require_tag_within(tag, kLargest);
  // Openings have no number, so one of theirs is free.
  if (kind == MessageKind::EndOfStep) return wire_tag({}, MessageKind::Opening) | (1 << 2);
  const std::uint32_t number = kind == MessageKind::Opening ? 0 : tag.number;
  return static_cast<int>(((tag.channel / 2) << 17U) | (number << 2U) | static_cast<std::uint32_t>(kind));
}

std::string encode_direct_opening(const DirectOpening& opening) {
  std::string bytes(kDirectOpeningBytes, static_cast<char>(opening.headers));
  std::memcpy(bytes.data() + 1, &opening.digest, sizeof opening.digest);
  return bytes;
}

DirectOpening decode_direct_opening(std::string_view bytes) {
  DirectOpening opening{.headers = static_cast<Headers>(bytes.front())};
  std::memcpy(&opening.digest, bytes.data() + 1, sizeof opening.digest);
  return opening;
}

void ShapeCache::begin_step() {
  if (!fresh_.empty()) metas_ = std::exchange(fresh_, {});
  next_.clear();
}

const Metas* ShapeCache::next(std::uint32_t number) {
  const auto found = metas_.find(number);
  const std::size_t index = next_[number]++;
  return found == metas_.end() || index >= found->second.size() ? nullptr : &found->second[index];
}

HeaderBytes encode_header(const Metas& metas) {
  const std::string bytes = encode_metadata(metas);
  const auto size = static_cast<std::uint32_t>(bytes.size());
  HeaderBytes header{.first = std::string(sizeof size, '\0'), .rest = {}};
  std::memcpy(header.first.data(), &size, sizeof size);
  const std::size_t capacity = kHeaderBytes - sizeof size;
  header.first += bytes.substr(0, capacity);
  header.first.resize(kHeaderBytes);
  if (bytes.size() > capacity) header.rest = bytes.substr(capacity);
  return header;
}

std::size_t rest_of_header(std::string_view first) {
  std::uint32_t size = 0;
  std::memcpy(&size, first.data(), sizeof size);
  const std::size_t capacity = kHeaderBytes - sizeof size;
  return size > capacity ? size - capacity : 0;
}

Metas decode_header(std::string_view first, std::string_view rest) {
  std::uint32_t size = 0;
  std::memcpy(&size, first.data(), sizeof size);
  std::string bytes(first.substr(sizeof size));
  bytes.append(rest);
  return decode_metadata(std::string_view(bytes).substr(0, size));
}

namespace {

// Returns false for wrappers of other tensors, such as subclasses and functorch's, and for freed parameters, whose
// storage is smaller than their sizes require.
bool has_memory(const at::Tensor& tensor) {
  if (tensor._is_zerotensor() || tensor.numel() == 0) return true;
  if (!tensor.unsafeGetTensorImpl()->has_storage()) return false;
  try {
    return tensor.storage().data() != nullptr &&
           tensor.storage().nbytes() >=
               at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                static_cast<std::size_t>(tensor.storage_offset()));
  } catch (const c10::Error&) {
    // The storage of a fake tensor throws when its memory is accessed.
    return false;
  }
}

// Returns a description of a tensor that has no elements in memory, and an empty text for one that has.
std::string unsendable_kind(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "a nested tensor";
  if (tensor.is_sparse()) return "a sparse " + describe(tensor);
  if (tensor.is_quantized()) return "a quantized " + describe(tensor);
  if (!tensor.device().is_cpu() && !has_streams(tensor.device())) return "a " + describe(tensor);
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    return "a " + describe(tensor) + " with layout " + layout.str();
  }
  if (has_memory(tensor)) return "";
  const bool is_subclass = tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  return "a " + describe(tensor) + (is_subclass ? " of a tensor subclass," : "") + " without memory of its own";
}

}  // namespace

std::string why_unsendable(const at::Tensor& tensor) {
  const std::string kind = tensor.defined() ? unsendable_kind(tensor) : "";
  return kind.empty()
             ? ""
             : kind +
                   "; only dense tensors in the memory of the CPU or of an accelerator can be sent between processes.";
}

Packed::Packed(const at::Tensor& given) {
  if (!given.defined()) return;
  requires_grad = given.requires_grad();
  const c10::AutoGradMode no_grad(false);
  // Autograd represents some zero gradients by tensors without memory.
  if (given._is_zerotensor()) {
    tensor = at::zeros(given.sizes(), given.options().requires_grad(false));
    return;
  }
  tensor = given.detach().resolve_conj().resolve_neg();
  if (!tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense()) tensor = tensor.contiguous();
}

std::optional<TensorMeta> Packed::meta() const {
  if (!tensor.defined()) return std::nullopt;
  return TensorMeta(tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), at::kCPU, requires_grad);
}

bool Packed::matches(const std::optional<TensorMeta>& expected) const {
  if (!expected || !tensor.defined()) return expected.has_value() == tensor.defined();
  return tensor.sizes() == at::IntArrayRef(expected->shape) && tensor.strides() == at::IntArrayRef(expected->strides) &&
         tensor.scalar_type() == expected->dtype && requires_grad == expected->requires_grad;
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  // Device backends transfer few dtypes.
  if (!tensor.is_cpu()) return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
  if (tensor.is_contiguous()) return tensor;
  // A send only reads the memory, and a receive writes only to tensors of which there is no other owner.
  void* data = const_cast<void*>(tensor.const_data_ptr());  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  return at::from_blob(data, {static_cast<std::int64_t>(tensor.nbytes())}, [tensor](void*) {}, at::kByte);
}

void throw_not_in_cached_step(Tag tag, int from) {
  throw PipeliningShapeError(concat(name_of(tag, "from", from),
                                    " was not sent in the step whose shapes are cached.\n  Hint: set dynamic_shapes to "
                                    "send shapes with every message."));
}

std::string name_of(Tag tag, const char* direction, int peer) {
  return concat("message ", tag.number, " of channel ", tag.channel, ' ', direction, " rank ", peer);
}

}  // namespace penstock::internal
