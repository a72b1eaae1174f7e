// The bytes of a file in memory, mapped or copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "penstock/tensor/file_access.h"

namespace penstock::internal {

// Thrown when a file cannot be mapped. The message names the file and has the system's message.
class MappingError : public std::runtime_error {
 public:
  enum class Reason : std::uint8_t { Open, Directory, NotRegular, Map, Read };

  MappingError(const std::string& path, Reason reason, int code);

  Reason reason() const { return reason_; }
  // Value of errno; 0 for Directory and NotRegular, and for a file that was truncated while it was read.
  int code() const { return code_; }

 private:
  Reason reason_;
  int code_;
};

// Holds all bytes of a regular file until it is destroyed. Unless it is read-only, the bytes may be written: pages are
// copied on write, and the file never changes. Any number of threads may read. A read-only mapping does not count as
// memory of the process (RLIMIT_DATA).
class MappedFile {
 public:
  // Throws MappingError.
  explicit MappedFile(const std::string& path, FileAccess access = FileAccess::Map, bool is_read_only = false);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Null for an empty file.
  char* data() const { return data_; }
  std::string_view bytes() const { return {data_, size_}; }

  // Gives pages of a part of the file back to the system, which reads them again when they are touched. Whole pages that
  // nobody has written to; those at the ends of the part stay.
  void release_pages(std::string_view part) const;

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
  // False for a copy, whose pages cannot be read again.
  bool is_mapped_ = false;
};

}  // namespace penstock::internal
