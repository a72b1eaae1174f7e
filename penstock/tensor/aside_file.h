// A file that is written beside its target and takes the target's name when it is whole and on the disk: whoever reads the
// target finds the old file or the new one, and never a part.
//
//   AsideFile file("manifest.json");
//   file.write(text.data(), text.size());
//   file.sync_and_rename();
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace penstock::internal {

class AsideFile {
 public:
  // Names the target, and says what the system said.
  class Failure : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
  };

  // All of them throw Failure.
  explicit AsideFile(const std::string& target);
  void write(const void* data, std::size_t size);
  void sync_and_rename();
  // Without sync_and_rename, nothing is left of it.
  ~AsideFile();
  AsideFile(const AsideFile&) = delete;
  AsideFile& operator=(const AsideFile&) = delete;

 private:
  [[noreturn]] void fail(const std::string& what) const;

  std::string target_;
  std::string name_;
  int folder_ = -1;
  int file_ = -1;
  bool renamed_ = false;
};

}  // namespace penstock::internal
