// The directory of a zip archive: what records it has, and where their bytes lie. Every place that it claims is held
// against the bytes that there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

struct ZipRecord {
  std::string name;
  // Its own header, and behind that its bytes.
  std::size_t header = 0;
  std::size_t begin = 0;
  std::size_t size = 0;
  // CRC-32 of the bytes.
  std::uint32_t checksum = 0;
  // The record's entry in the directory.
  std::size_t entry = 0;

  std::size_t end() const { return begin + size; }
};

// What is wrong with an archive, to stand behind its name.
class ZipError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In the order of the directory. Throws ZipError, also for records that are compressed, or lie in one place: one place
// under many names would make much of a small archive.
std::vector<ZipRecord> read_zip_directory(std::string_view archive);

// Where an archive keeps the checksum of a record, four bytes each.
struct ChecksumPlaces {
  std::size_t directory = 0;
  // In the record's own header, or behind its bytes.
  std::size_t own = 0;
};
// Throws ZipError if what stands there is not the checksum.
ChecksumPlaces checksum_places(std::string_view archive, const ZipRecord& record);

}  // namespace penstock::internal
