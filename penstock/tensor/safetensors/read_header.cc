#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/safetensors/dtype.h"
#include "penstock/tensor/safetensors/header.h"
#include "penstock/tensor/tensor_text.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian, and are mapped as they are");

// Receives the events of nlohmann's SAX parser. Unlike a parsed document, events show duplicate keys, and a value that
// is nested too deeply is refused before it is built.
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
      dtype_ = find_safetensors_dtype(value);
      if (dtype_ == nullptr) fail_tensor("its dtype is ", quoted_text(value), ".", safetensors_code_hint());
      next_ = Next::Field;
    } else {
      refuse(quoted_text(value));
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
        if (header_.metadata.contains(key)) fail_safetensors(source_, "__metadata__ has ", quoted_text(key), " twice.");
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
    fail_safetensors(source_, "its header ", (utf8 ? "is not valid JSON" : "is not UTF-8"), " at byte ", position, ".");
  }

 private:
  // The event expected next: a value of this kind, or the end of the object or list that contains it.
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

  template <TextPart... Parts>
  [[noreturn]] void fail_tensor(const Parts&... problem) const {
    fail_safetensors(source_, quoted_tensor(header_.entries.back().name), ": ", problem...);
  }

  [[noreturn]] void refuse(const std::string& found) const {
    const std::string but = ", but is " + found + ".";
    switch (next_) {
      case Next::Metadata: fail_safetensors(source_, "__metadata__ should be an object", but);
      case Next::MetadataValue:
        fail_safetensors(source_, "__metadata__ ", quoted_text(key_), " should be a string", but);
      case Next::Tensor: fail_tensor("it should be an object", but);
      case Next::Dtype: fail_tensor("its dtype should be a string", but);
      case Next::Shape: fail_tensor("its shape should be a list of sizes", but);
      case Next::Size: fail_tensor("its shape[", shape_.size(), "] should be a size", but);
      case Next::Offsets: fail_tensor("its data_offsets should be a list of two offsets", but);
      case Next::Offset: fail_tensor("its data_offsets[", offsets_.size(), "] should be an offset", but);
      default: fail_safetensors(source_, "its header should be an object", but);
    }
  }

  void begin_entry(std::string name) {
    if (!names_.insert(name).second) fail_safetensors(source_, quoted_text(name), " appears twice in its header.");
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
      fail_tensor("it has an unknown field ", quoted_text(key),
                  ".\n  Hint: the fields are dtype, shape, data_offsets.");
    }
    if (!fields_.insert(key).second) fail_tensor("it has ", quoted_text(key), " twice.");
  }

  void end_entry() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!fields_.contains(field)) fail_tensor("it has no ", field, ".");
    }
    if (offsets_.size() != 2) fail_tensor("its data_offsets should be two, but are ", short_list_text(offsets_), ".");
    if (offsets_[1] < offsets_[0])
      fail_tensor("its data_offsets ", short_list_text(offsets_), " end before they begin.");
    if (offsets_[1] > data_size_) {
      fail_tensor("its data_offsets ", short_list_text(offsets_), " reach beyond the file, which has ", data_size_,
                  " bytes of data.");
    }
    if (dtype_->packed != 1) {
      if (shape_.empty() || shape_.back() % dtype_->packed != 0) {
        fail_tensor("its shape ", short_list_text(shape_), " cannot be that of a ", dtype_->name,
                    ": the last dimension should be a multiple of ", dtype_->packed, ".");
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
    const auto wanted = tensor_bytes(*dtype_, shape_);
    if (found == wanted) return;
    fail_tensor("its ", found, " bytes do not hold a ", dtype_->name, " of shape ", short_list_text(shape_),
                ", which takes ", (wanted ? std::to_string(*wanted) : "more than a file has"), ".");
  }

  const std::string& source_;
  std::size_t data_size_;
  SafetensorsHeader header_;
  Next next_ = Next::Header;
  std::unordered_set<std::string> names_;
  std::string key_;
  // State of the entry that is being read.
  std::unordered_set<std::string> fields_;
  const SafetensorsDtype* dtype_ = nullptr;
  std::vector<std::int64_t> shape_;
  std::vector<std::size_t> offsets_;
};

// Returns the JSON text of the header, whose length the first 8 bytes announce.
std::string_view header_text(std::string_view file, const std::string& source) {
  if (file.size() < kLengthBytes) {
    fail_safetensors(source, "is ", file.size(), " bytes long; a safetensors file has at least 8.");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    fail_safetensors(source, "its first 8 bytes announce a header of ", length,
                     " bytes; at most 100000000 are allowed.\n  Hint: is it a safetensors file?");
  }
  if (length > file.size() - kLengthBytes) {
    fail_safetensors(source, "its first 8 bytes announce a header of ", length, " bytes, but only ",
                     file.size() - kLengthBytes, " follow.\n  Hint: was it copied or downloaded to its end?");
  }
  const std::string_view text = file.substr(kLengthBytes, length);
  if (text.empty()) fail_safetensors(source, "its header is empty.");
  if (!text.starts_with('{'))
    fail_safetensors(source, "its header should begin with '{', but begins with ", quoted_text(text.substr(0, 1)), ".");
  // nlohmann's parser stops at a zero byte.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    fail_safetensors(source, "its header is not valid JSON at byte ", zero + 1, ".");
  }
  return text;
}

// Requires that each entry begins where the one before it ends, and that the last ends with the file.
void require_gapless(const SafetensorsHeader& header, std::size_t data_size, const std::string& source) {
  const auto offsets = [](const SafetensorsEntry& entry) {
    return short_list_text(std::vector{entry.begin, entry.end});
  };
  std::size_t end = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin < end) {
      fail_safetensors(source, quoted_tensor(entry.name), ": its data_offsets ", offsets(entry), " overlap those of ",
                       quoted_tensor(before->name), ", ", offsets(*before), ".");
    }
    if (entry.begin > end) {
      fail_safetensors(source, quoted_tensor(entry.name), ": its data_offsets ", offsets(entry), " should begin at ",
                       end, ": the bytes before them belong to no tensor.");
    }
    end = entry.end;
    before = &entry;
  }
  if (end < data_size) {
    fail_safetensors(source, "its data has ", data_size, " bytes, but its tensors end at ", end,
                     ": the bytes after that belong to no tensor.");
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source) {
  const std::string_view text = header_text(file, source);
  const std::size_t data_begin = kLengthBytes + text.size();
  HeaderReader reader(source, file.size() - data_begin);
  json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header = reader.take();
  header.data_begin = data_begin;
  // Several empty tensors may have the same offsets, so the name makes the order unique.
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  require_gapless(header, file.size() - data_begin, source);
  return header;
}

}  // namespace penstock::internal
