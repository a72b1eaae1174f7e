// A directory for the files of one command, which goes with it.
#pragma once

#include <filesystem>

namespace penstock::cli {

// Its name is penstock-XXXXXX, in the system's directory for temporary files. A lock on it, which the system releases when the
// process ends, shows that it is in use; the next one that is made removes those of processes that were killed.
class TemporaryDirectory {
 public:
  // Throws std::runtime_error.
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace penstock::cli
