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

// Holds all bytes of a regular file until it is destroyed. Unless the mapping is read-only, the bytes may be written:
// pages are copied on write, and the file never changes. Any number of threads may read.
class MappedFile {
 public:
  // Throws MappingError.
  explicit MappedFile(const std::string& path, FileAccess access = FileAccess::Map);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Null for an empty file.
  char* data() const { return data_; }
  std::string_view bytes() const { return {data_, size_}; }

  // Gives the whole pages in a part of a read-only mapping back to the system, which reads them again when they are
  // touched. Does nothing for other files.
  void release_pages(std::string_view part) const;

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
  FileAccess access_;
};

}  // namespace penstock::internal
