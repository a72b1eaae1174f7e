// Fuzzes the reader of safetensors headers: any bytes are a file or an error. The tensors of a file do not overlap and
// are inside of it, and the header survives a round trip through its own bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "penstock/tensor/safetensors_header.h"

namespace penstock {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

std::size_t elements_of(const SafetensorsEntry& entry) {
  std::size_t count = 1;
  for (const std::int64_t size : entry.shape) {
    require(size >= 0);
    count *= static_cast<std::size_t>(size);
  }
  return count;
}

// Tries a file with this header, and as many bytes of data as it states.
std::string file_of(const SafetensorsHeader& header) {
  std::string bytes = to_bytes(header, "header");
  require(bytes.size() % 8 == 0);
  if (!header.entries.empty()) bytes.append(header.entries.back().end, '\0');
  return bytes;
}

void try_file(std::string_view file) {
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(file, "fuzz");
  } catch (const SafetensorsError& error) {
    require(std::string_view(error.what()).starts_with("fuzz: "));
    return;
  }
  std::size_t end = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    require(entry.begin == end && entry.begin <= entry.end);
    require(entry.end - entry.begin == elements_of(entry) * safetensors_element_size(entry.dtype));
    end = entry.end;
  }
  require(header.data_begin + end == file.size());

  SafetensorsHeader again = parse_safetensors_header(file_of(header), "again");
  require(again.entries == header.entries && again.metadata == header.metadata);

  const SafetensorsHeader ours = lay_out_safetensors(header.entries, header.metadata, "ours");
  for (const SafetensorsEntry& entry : ours.entries) {
    require(entry.begin % safetensors_element_size(entry.dtype) == 0);
  }
  again = parse_safetensors_header(file_of(ours), "ours");
  require(again.entries.size() == ours.entries.size() && again.metadata == ours.metadata);
}

// Tries the same bytes with a matching length before them: a header up to the last brace, and data.
std::string with_length(std::string_view bytes) {
  const std::size_t brace = bytes.rfind('}');
  const std::uint64_t length = brace == std::string_view::npos ? bytes.size() : brace + 1;
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(bytes);
}

}  // namespace
}  // namespace penstock

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  penstock::try_file(bytes);
  penstock::try_file(penstock::with_length(bytes));
  return 0;
}
