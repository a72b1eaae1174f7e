// Reads the central directory of a zip archive: the records and their offsets. Every offset is checked against the size
// of the archive.
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
  // Offsets of the record's local header and of its bytes.
  std::size_t header = 0;
  std::size_t begin = 0;
  std::size_t size = 0;
  // CRC-32 of the bytes.
  std::uint32_t checksum = 0;
  // Offset of the record's entry in the directory.
  std::size_t entry = 0;

  std::size_t end() const { return begin + size; }
};

// An error in an archive. The message is to follow the archive's name.
class ZipError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns the records in the order of the directory. Throws ZipError if the archive is damaged, and for records that
// are compressed or overlap: with those, a small archive could expand to much memory.
std::vector<ZipRecord> read_zip_directory(std::string_view archive);

// Offsets of the two copies of a record's checksum, of four bytes each.
struct ChecksumOffsets {
  // In the entry of the directory.
  std::size_t directory = 0;
  // In the record's local header, or in the data descriptor after its bytes.
  std::size_t local = 0;
};
// Throws ZipError if the checksum is not there.
ChecksumOffsets checksum_offsets(std::string_view archive, const ZipRecord& record);

}  // namespace penstock::internal
