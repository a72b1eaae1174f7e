// Fuzzes the parser of safetensors headers: any bytes give a header or a SafetensorsError. The byte ranges of a parsed
// header lie within the file and do not overlap, and the header survives being written and parsed again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/safetensors/dtype.h"
#include "penstock/tensor/safetensors/header.h"

namespace penstock::internal {
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

// Returns a file with this header and as many bytes of data as it announces.
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
    require(entry.end - entry.begin == elements_of(entry) * find_safetensors_dtype(entry.dtype)->element_bytes);
    end = entry.end;
  }
  require(header.data_begin + end == file.size());

  SafetensorsHeader again = parse_safetensors_header(file_of(header), "again");
  require(again.entries == header.entries && again.metadata == header.metadata);

  const SafetensorsHeader sorted = lay_out_safetensors(header.entries, header.metadata, "sorted");
  for (const SafetensorsEntry& entry : sorted.entries) {
    require(entry.begin % find_safetensors_dtype(entry.dtype)->element_bytes == 0);
  }
  again = parse_safetensors_header(file_of(sorted), "sorted");
  require(again.entries.size() == sorted.entries.size() && again.metadata == sorted.metadata);
}

// Returns the bytes with a valid length before them: the header ends at the last brace, and data follows.
std::string with_length(std::string_view bytes) {
  const std::size_t brace = bytes.rfind('}');
  const std::uint64_t length = brace == std::string_view::npos ? bytes.size() : brace + 1;
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(bytes);
}

}  // namespace
}  // namespace penstock::internal

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  penstock::internal::try_file(bytes);
  penstock::internal::try_file(penstock::internal::with_length(bytes));
  return 0;
}
