// A run directory: created when it is missing, checked to be writable, and locked against other runs.
//
//   const RunDirectory output("runs/7");   // throws RunDirectoryError while another process holds it
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock::internal {

// Thrown when a run directory cannot be used. The message names the directory and the problem, and has a hint.
class RunDirectoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RunDirectory {
 public:
  // Creates the directory and its missing parents, and acquires its lock: an flock on a file inside, which the system
  // releases when the process ends for any reason. The file contains the process id, so writing it also shows that the
  // directory is writable. Throws RunDirectoryError, which names the process that holds the lock. On a file system
  // without locks there is none.
  explicit RunDirectory(const std::string& path);
  // Releases the lock. Directories that the constructor created are removed if they are still empty.
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  // Throws RunDirectoryError if the file system has fewer free bytes. `contents` names what is to be written, such as
  // "4 checkpoints".
  void require_space(std::uintmax_t bytes, const std::string& contents) const;

 private:
  void create();
  void lock();
  void release() noexcept;
  [[noreturn]] void fail(const std::string& problem) const;

  std::string path_;
  // Directories that the constructor has created, outermost first.
  std::vector<std::filesystem::path> created_;
  std::string lock_path_;
  // File descriptor of the lock file; -1 if it is not open.
  int lock_ = -1;
};

}  // namespace penstock::internal
