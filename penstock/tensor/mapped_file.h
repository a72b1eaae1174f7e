// A file in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace penstock::internal {

// Explains why a file cannot be mapped: the message names the file and has what the system said.
class MappingFailure : public std::runtime_error {
 public:
  enum class Why { Open, Folder, NotRegular, Map, Read };

  MappingFailure(const std::string& path, Why why, int code);

  Why why() const { return why_; }
  // Value of errno; 0 for Folder and NotRegular, and for a file that has become shorter.
  int code() const { return code_; }

 private:
  Why why_;
  int code_;
};

// Map: pages are read when they are touched, and a file that others cut short meanwhile ends the process. Read: all bytes are
// copied at once, and whoever changes the file later changes nothing here.
enum class FileAccess : std::uint8_t { Map, Read };

// All bytes of a file, for as long as this lives. They may be written; the file does not change by it.
class MappedFile {
 public:
  // Throws MappingFailure.
  explicit MappedFile(const std::string& path, FileAccess access = FileAccess::Map);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  std::string_view bytes() const { return {data_, size_}; }

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace penstock::internal
