// A file in memory.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock {

// Why a file cannot be mapped. Who maps it says so in words of its own.
struct MappingFailure {
  enum class Why { Open, Folder, NotRegular, Map };
  Why why = Why::Open;
  // What the system said: errno.
  int code = 0;
};

// All bytes of a file, for as long as this lives. They may be written; the file does not change by it.
class MappedFile {
 public:
  // Throws MappingFailure.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  std::string_view bytes() const { return {data_, size_}; }

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace penstock
