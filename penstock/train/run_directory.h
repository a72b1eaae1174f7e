// A directory that a run writes to: created when it is missing, writable, and locked against other runs.
//
//   const RunDirectory output("runs/7");   // throws RunDirectoryError while another process has it
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock::internal {

// The message names the directory, what is wrong with it, and what can be done.
class RunDirectoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RunDirectory {
 public:
  // Creates the directory and those above it where they are missing, and takes its lock: an flock on a file inside, which
  // the system releases when the process ends, however it ends. The file holds the process id, so writing it also shows
  // that the directory can be written to. Throws RunDirectoryError, which names the process that holds the lock. File
  // systems without locks are used without one.
  explicit RunDirectory(const std::string& path);
  // Releases the lock. Directories that the constructor created are removed if they are still empty.
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  // Throws RunDirectoryError when the file system has less room than what is to be written, which errors call `what`, such
  // as "4 checkpoints".
  void require_space(std::uintmax_t bytes, const std::string& what) const;

 private:
  void create();
  void lock();
  void release() noexcept;
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  // From the outermost on.
  std::vector<std::filesystem::path> created_;
  std::string lock_path_;
  int lock_ = -1;
};

}  // namespace penstock::internal
