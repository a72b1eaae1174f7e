#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
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

constexpr std::size_t kAlignment = 8;

std::string json_text(const std::string& text, const char* what, const std::string& name, const std::string& source) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    fail_safetensors(source, what, quoted_text(name), " is not UTF-8.");
  }
}

}  // namespace

SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> entries,
                                      std::map<std::string, std::string> metadata, const std::string& source) {
  std::unordered_set<std::string_view> names;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == kMetadataKey) fail_safetensors(source, "a tensor cannot be named '__metadata__'.");
    if (!names.insert(entry.name).second)
      fail_safetensors(source, "there are two tensors named ", quoted_text(entry.name), ".");
    const SafetensorsDtype* const dtype = find_safetensors_dtype(entry.dtype);
    if (dtype == nullptr) {
      fail_safetensors(source, quoted_tensor(entry.name), ": its dtype is ", c10::toString(entry.dtype),
                       ", which safetensors do not support.", safetensors_name_hint());
    }
    if (dtype->packed != 1 && entry.shape.empty()) {
      fail_safetensors(source, quoted_tensor(entry.name), ": a ", dtype->name,
                       " should have a dimension, along which its values are packed.");
    }
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(find_safetensors_dtype(b.dtype), std::string_view(a.name)) <
           std::pair(find_safetensors_dtype(a.dtype), std::string_view(b.name));
  });
  std::size_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    const auto bytes = tensor_bytes(*find_safetensors_dtype(entry.dtype), entry.shape);
    if (!bytes || *bytes > std::numeric_limits<std::int64_t>::max() - end) {
      fail_safetensors(source, quoted_tensor(entry.name), ": its shape ", short_list_text(entry.shape),
                       " takes more bytes than a file has.");
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
    const SafetensorsDtype& dtype = *find_safetensors_dtype(entry.dtype);
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
  if (length > kMaxHeaderBytes) {
    fail_safetensors(source, "its header would have ", length, " bytes; at most 100000000 are allowed.");
  }
  std::memcpy(text.data(), &length, kLengthBytes);
  return text;
}

}  // namespace penstock::internal
