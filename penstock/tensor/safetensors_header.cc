#include "penstock/tensor/safetensors_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace penstock::internal {
namespace {

using c10::ScalarType;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian, and are mapped as they are");

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMostHeaderBytes = 100'000'000;
constexpr std::size_t kAlignment = 8;
constexpr const char* kMetadataKey = "__metadata__";

struct Dtype {
  std::string_view code;
  ScalarType type;
  std::string_view name;
  std::size_t bytes;
  // How many values of the file's shape are one element of torch's.
  std::int64_t packed = 1;
};

// In the order of the Python package, by which its writer sorts.
constexpr std::array<Dtype, 20> kDtypes = {{
    {"BOOL", ScalarType::Bool, "bool", 1},
    {"F4", ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", 1, 2},
    {"U8", ScalarType::Byte, "uint8", 1},
    {"I8", ScalarType::Char, "int8", 1},
    {"F8_E5M2", ScalarType::Float8_e5m2, "float8_e5m2", 1},
    {"F8_E4M3", ScalarType::Float8_e4m3fn, "float8_e4m3fn", 1},
    {"F8_E8M0", ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", 1},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", 1},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", 1},
    {"I16", ScalarType::Short, "int16", 2},
    {"U16", ScalarType::UInt16, "uint16", 2},
    {"F16", ScalarType::Half, "float16", 2},
    {"BF16", ScalarType::BFloat16, "bfloat16", 2},
    {"I32", ScalarType::Int, "int32", 4},
    {"U32", ScalarType::UInt32, "uint32", 4},
    {"F32", ScalarType::Float, "float32", 4},
    {"C64", ScalarType::ComplexFloat, "complex64", 8},
    {"F64", ScalarType::Double, "float64", 8},
    {"I64", ScalarType::Long, "int64", 8},
    {"U64", ScalarType::UInt64, "uint64", 8},
}};

const Dtype* find_dtype(std::string_view code) {
  const auto* const found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& d) { return d.code == code; });
  return found == kDtypes.end() ? nullptr : found;
}

const Dtype* find_dtype(ScalarType type) {
  const auto* const found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& d) { return d.type == type; });
  return found == kDtypes.end() ? nullptr : found;
}

std::string dtype_hint(std::string_view Dtype::* column) {
  std::string text = "\n  Hint: the dtypes are ";
  for (const Dtype& dtype : kDtypes) text += (&dtype == kDtypes.data() ? "" : ", ") + std::string(dtype.*column);
  return text + ".";
}

[[noreturn]] void fail(const std::string& source, const std::string& what) {
  throw SafetensorsError(source + ": " + what);
}

// In quotes, on one line, and not too long.
std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMost = 200;
  const std::string shown = json(text.substr(0, kMost)).dump(-1, ' ', false, json::error_handler_t::replace);
  return "'" + shown.substr(1, shown.size() - 2) + (text.size() > kMost ? "…'" : "'");
}

template <class Number>
std::string list_text(const std::vector<Number>& numbers) {
  constexpr std::size_t kMost = 16;
  std::string text = "[";
  for (std::size_t i = 0; i < std::min(numbers.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  }
  return text + (numbers.size() > kMost ? ", …]" : "]");
}

// The bytes that a dtype and a shape take; nothing if they are too many. An empty dimension does not make up for the
// others: torch computes strides of them.
std::optional<std::size_t> bytes_of(const Dtype& dtype, const std::vector<std::int64_t>& shape) {
  const auto most = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max() / dtype.packed);
  std::size_t bytes = dtype.bytes;
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty = empty || size == 0;
    const auto factor = static_cast<std::size_t>(std::max<std::int64_t>(size, 1));
    if (bytes > most / factor) return std::nullopt;
    bytes *= factor;
  }
  return empty ? 0 : bytes;
}

// Takes the events of nlohmann's SAX parser, and so knows at each value where in the header it stands, sees keys that
// are there twice, and refuses what is nested too deeply before it is built.
class HeaderReader {
 public:
  HeaderReader(const std::string& source, std::size_t data_size) : source_(source), data_size_(data_size) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() {
    if (next_ != Next::Metadata) refuse("null");
    next_ = Next::Name;
    return true;
  }
  bool boolean(bool value) { refuse(value ? "true" : "false"); }
  bool number_integer(json::number_integer_t value) { refuse(std::to_string(value)); }
  bool number_float(json::number_float_t /*value*/, const std::string& text) { refuse(text.substr(0, 40)); }
  bool binary(json::binary_t& /*value*/) { refuse("binary"); }

  bool number_unsigned(json::number_unsigned_t value) {
    if (next_ == Next::Size) {
      if (!std::in_range<std::int64_t>(value)) refuse(std::to_string(value));
      shape_.push_back(static_cast<std::int64_t>(value));
    } else if (next_ == Next::Offset) {
      offsets_.push_back(value);
    } else {
      refuse(std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (next_ == Next::MetadataValue) {
      header_.metadata[key_] = std::move(value);
      next_ = Next::MetadataKey;
    } else if (next_ == Next::Dtype) {
      dtype_ = find_dtype(value);
      if (dtype_ == nullptr) fail_tensor("its dtype is " + in_quotes(value) + "." + dtype_hint(&Dtype::code));
      next_ = Next::Field;
    } else {
      refuse(in_quotes(value));
    }
    return true;
  }

  bool start_object(std::size_t /*size*/) {
    switch (next_) {
      case Next::Header: next_ = Next::Name; break;
      case Next::Metadata: next_ = Next::MetadataKey; break;
      case Next::Tensor: next_ = Next::Field; break;
      default: refuse("an object");
    }
    return true;
  }

  bool key(std::string& key) {
    switch (next_) {
      case Next::Name: begin_entry(std::move(key)); break;
      case Next::MetadataKey:
        if (header_.metadata.contains(key)) fail(source_, "__metadata__ has " + in_quotes(key) + " twice.");
        key_ = std::move(key);
        next_ = Next::MetadataValue;
        break;
      default: begin_field(key); break;
    }
    return true;
  }

  bool end_object() {
    if (next_ == Next::Field) end_entry();
    next_ = Next::Name;
    return true;
  }

  bool start_array(std::size_t /*size*/) {
    switch (next_) {
      case Next::Shape: next_ = Next::Size; break;
      case Next::Offsets: next_ = Next::Offset; break;
      default: refuse("a list");
    }
    return true;
  }

  bool end_array() {
    next_ = Next::Field;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/, const json::exception& error) {
    const bool utf8 = std::string_view(error.what()).find("ill-formed UTF-8") == std::string_view::npos;
    fail(source_, std::string("its header ") + (utf8 ? "is no JSON" : "is not UTF-8") + " at byte " +
                      std::to_string(position) + ".");
  }

 private:
  // What comes next: a value of this kind, or within an object or a list, possibly its end.
  enum class Next {
    Header,
    Name,
    Metadata,
    MetadataKey,
    MetadataValue,
    Tensor,
    Field,
    Dtype,
    Shape,
    Size,
    Offsets,
    Offset
  };

  [[noreturn]] void fail_tensor(const std::string& what) const {
    fail(source_, tensor_text(header_.entries.back().name) + ": " + what);
  }

  [[noreturn]] void refuse(const std::string& found) const {
    const std::string but = ", but is " + found + ".";
    switch (next_) {
      case Next::Metadata: fail(source_, "__metadata__ should be an object" + but);
      case Next::MetadataValue: fail(source_, "__metadata__ " + in_quotes(key_) + " should be a string" + but);
      case Next::Tensor: fail_tensor("it should be an object" + but);
      case Next::Dtype: fail_tensor("its dtype should be a string" + but);
      case Next::Shape: fail_tensor("its shape should be a list of sizes" + but);
      case Next::Size: fail_tensor("its shape[" + std::to_string(shape_.size()) + "] should be a size" + but);
      case Next::Offsets: fail_tensor("its data_offsets should be a list of two offsets" + but);
      case Next::Offset:
        fail_tensor("its data_offsets[" + std::to_string(offsets_.size()) + "] should be an offset" + but);
      default: fail(source_, "its header should be an object" + but);
    }
  }

  void begin_entry(std::string name) {
    if (!names_.insert(name).second) fail(source_, in_quotes(name) + " is twice in its header.");
    if (name == kMetadataKey) {
      next_ = Next::Metadata;
      return;
    }
    header_.entries.emplace_back().name = std::move(name);
    fields_.clear();
    shape_.clear();
    offsets_.clear();
    next_ = Next::Tensor;
  }

  void begin_field(const std::string& key) {
    if (key == "dtype") {
      next_ = Next::Dtype;
    } else if (key == "shape") {
      next_ = Next::Shape;
    } else if (key == "data_offsets") {
      next_ = Next::Offsets;
    } else {
      fail_tensor("it has an unknown field " + in_quotes(key) +
                  ".\n  Hint: the fields are dtype, shape, data_offsets.");
    }
    if (!fields_.insert(key).second) fail_tensor("it has " + in_quotes(key) + " twice.");
  }

  void end_entry() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!fields_.contains(field)) fail_tensor("it has no " + std::string(field) + ".");
    }
    if (offsets_.size() != 2) fail_tensor("its data_offsets should be two, but are " + list_text(offsets_) + ".");
    if (offsets_[1] < offsets_[0]) fail_tensor("its data_offsets " + list_text(offsets_) + " end before they begin.");
    if (offsets_[1] > data_size_) {
      fail_tensor("its data_offsets " + list_text(offsets_) + " reach beyond the file, which has " +
                  std::to_string(data_size_) + " bytes of data.");
    }
    if (dtype_->packed != 1) {
      if (shape_.empty() || shape_.back() % dtype_->packed != 0) {
        fail_tensor("its shape " + list_text(shape_) + " cannot be that of a " + std::string(dtype_->name) +
                    ": the last dimension should be a multiple of " + std::to_string(dtype_->packed) + ".");
      }
      shape_.back() /= dtype_->packed;
    }
    require_size(offsets_[1] - offsets_[0]);
    SafetensorsEntry& entry = header_.entries.back();
    entry.dtype = dtype_->type;
    entry.shape = shape_;
    entry.begin = offsets_[0];
    entry.end = offsets_[1];
  }

  void require_size(std::size_t found) const {
    const auto wanted = bytes_of(*dtype_, shape_);
    if (found == wanted) return;
    fail_tensor("its " + std::to_string(found) + " bytes do not hold a " + std::string(dtype_->name) + " of shape " +
                list_text(shape_) + ", which takes " + (wanted ? std::to_string(*wanted) : "more than a file has") +
                ".");
  }

  const std::string& source_;
  std::size_t data_size_;
  SafetensorsHeader header_;
  Next next_ = Next::Header;
  std::unordered_set<std::string> names_;
  std::string key_;
  // The entry that is being read.
  std::unordered_set<std::string> fields_;
  const Dtype* dtype_ = nullptr;
  std::vector<std::int64_t> shape_;
  std::vector<std::size_t> offsets_;
};

// The text of the header, which the first 8 bytes measure.
std::string_view header_of(std::string_view file, const std::string& source) {
  if (file.size() < kLengthBytes) {
    fail(source,
         "is " + std::to_string(file.size()) + " bytes long, and so no safetensors file, which has 8 at least.");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMostHeaderBytes) {
    fail(source, "its first 8 bytes announce a header of " + std::to_string(length) +
                     " bytes, which may have 100000000 at most.\n  Hint: is it a safetensors file?");
  }
  if (length > file.size() - kLengthBytes) {
    fail(source, "its first 8 bytes announce a header of " + std::to_string(length) + " bytes, but only " +
                     std::to_string(file.size() - kLengthBytes) +
                     " follow.\n  Hint: was it copied or downloaded to its end?");
  }
  const std::string_view text = file.substr(kLengthBytes, length);
  if (text.empty()) fail(source, "its header is empty.");
  if (!text.starts_with('{'))
    fail(source, "its header should begin with '{', but begins with " + in_quotes(text.substr(0, 1)) + ".");
  // nlohmann takes a zero byte for the end.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    fail(source, "its header is no JSON at byte " + std::to_string(zero + 1) + ".");
  }
  return text;
}

// Each entry's bytes begin where those of the one before end, and the last ends with the file.
void require_gapless(const SafetensorsHeader& header, std::size_t data_size, const std::string& source) {
  const auto offsets = [](const SafetensorsEntry& entry) { return list_text(std::vector{entry.begin, entry.end}); };
  std::size_t end = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin < end) {
      fail(source, tensor_text(entry.name) + ": its data_offsets " + offsets(entry) + " overlap those of " +
                       tensor_text(before->name) + ", " + offsets(*before) + ".");
    }
    if (entry.begin > end) {
      fail(source, tensor_text(entry.name) + ": its data_offsets " + offsets(entry) + " should begin at " +
                       std::to_string(end) + ": the bytes before them are no tensor's.");
    }
    end = entry.end;
    before = &entry;
  }
  if (end < data_size) {
    fail(source, "its data has " + std::to_string(data_size) + " bytes, but its tensors end at " + std::to_string(end) +
                     ": those after it are no tensor's.");
  }
}

std::string json_text(const std::string& text, const char* what, const std::string& name, const std::string& source) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    fail(source, what + in_quotes(name) + " is not UTF-8.");
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source) {
  const std::string_view text = header_of(file, source);
  const std::size_t data_begin = kLengthBytes + text.size();
  HeaderReader reader(source, file.size() - data_begin);
  json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header = reader.take();
  header.data_begin = data_begin;
  // Empty tensors may lie at one place.
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  require_gapless(header, file.size() - data_begin, source);
  return header;
}

SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> entries,
                                      std::map<std::string, std::string> metadata, const std::string& source) {
  std::unordered_set<std::string_view> names;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == kMetadataKey) fail(source, "no tensor can have the name '__metadata__'.");
    if (!names.insert(entry.name).second)
      fail(source, "there are two tensors of the name " + in_quotes(entry.name) + ".");
    const Dtype* const dtype = find_dtype(entry.dtype);
    if (dtype == nullptr) {
      fail(source, tensor_text(entry.name) + ": its dtype is " + c10::toString(entry.dtype) +
                       ", which safetensors do not have." + dtype_hint(&Dtype::name));
    }
    if (dtype->packed != 1 && entry.shape.empty()) {
      fail(source, tensor_text(entry.name) + ": a " + std::string(dtype->name) +
                       " should have a dimension, along which its values are packed.");
    }
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(find_dtype(b.dtype), std::string_view(a.name)) <
           std::pair(find_dtype(a.dtype), std::string_view(b.name));
  });
  std::size_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    const auto bytes = bytes_of(*find_dtype(entry.dtype), entry.shape);
    if (!bytes || *bytes > std::numeric_limits<std::int64_t>::max() - end) {
      fail(source,
           tensor_text(entry.name) + ": its shape " + list_text(entry.shape) + " takes more bytes than a file has.");
    }
    entry.begin = end;
    entry.end = end += *bytes;
  }
  return {.entries = std::move(entries), .metadata = std::move(metadata)};
}

std::string to_bytes(const SafetensorsHeader& header, const std::string& source) {
  std::string text(kLengthBytes, '\0');
  text += '{';
  if (!header.metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : header.metadata) {
      text += json_text(key, "metadata ", key, source) + ":" + json_text(value, "metadata ", key, source) + ",";
    }
    text.back() = '}';
    text += ',';
  }
  for (const SafetensorsEntry& entry : header.entries) {
    const Dtype& dtype = *find_dtype(entry.dtype);
    json shape = entry.shape;
    if (dtype.packed != 1) shape.back() = entry.shape.back() * dtype.packed;
    text += json_text(entry.name, "the name of tensor ", entry.name, source);
    text += ":{\"dtype\":\"" + std::string(dtype.code) + "\",\"shape\":" + shape.dump() +
            ",\"data_offsets\":" + json{entry.begin, entry.end}.dump() + "},";
  }
  if (text.ends_with(',')) text.pop_back();
  text += '}';
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');

  const std::uint64_t length = text.size() - kLengthBytes;
  if (length > kMostHeaderBytes) {
    fail(source, "its header would have " + std::to_string(length) + " bytes, which may have 100000000 at most.");
  }
  std::memcpy(text.data(), &length, kLengthBytes);
  return text;
}

std::size_t safetensors_element_size(ScalarType dtype) {
  return find_dtype(dtype)->bytes;
}

std::string tensor_text(std::string_view name) {
  return "tensor " + in_quotes(name);
}

}  // namespace penstock::internal
