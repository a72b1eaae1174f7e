// A directory for the temporary files of one command.
#pragma once

#include <filesystem>

namespace penstock::internal::cli {

// Creates penstock-XXXXXX in the system's directory for temporary files (TMPDIR) and removes it in the destructor. A
// lock, which the system releases when the process ends, marks a directory that is in use; the constructor removes
// those of killed processes.
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

}  // namespace penstock::internal::cli
