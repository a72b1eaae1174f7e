#include "penstock/cli/temporary_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace penstock::internal::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "penstock-";
constexpr std::size_t kRandom = 6;

// Locks a directory and returns its descriptor, or -1 if another process holds the lock or the directory no longer
// exists.
int locked(const fs::path& path) {
  const int opened = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened < 0) return -1;
  struct stat held{};
  struct stat there{};
  const bool is_ours = ::flock(opened, LOCK_EX | LOCK_NB) == 0 && ::fstat(opened, &held) == 0 &&
                       ::lstat(path.c_str(), &there) == 0 && held.st_ino == there.st_ino &&
                       held.st_dev == there.st_dev && held.st_uid == ::geteuid();
  if (is_ours) return opened;
  ::close(opened);
  return -1;
}

// Removes the directories that killed processes have left: those that nobody has locked.
void remove_leftovers(const fs::path& parent) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (fs::directory_iterator next(parent, ignored), end; next != end; next.increment(ignored)) {
    const std::string name = next->path().filename().string();
    if (name.starts_with(kPrefix) && name.size() == kPrefix.size() + kRandom) found.push_back(next->path());
  }
  for (const fs::path& path : found) {
    const int lock = locked(path);
    if (lock < 0) continue;
    fs::remove_all(path, ignored);
    ::close(lock);
  }
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  const fs::path parent = fs::temp_directory_path();
  remove_leftovers(parent);
  // Another process may remove the new directory before it is locked here.
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts && lock_ < 0; ++attempt) {
    std::string name = (parent / kPrefix).string() + std::string(kRandom, 'X');
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error(parent.string() +
                               ": could not create a temporary directory: " + std::generic_category().message(errno) +
                               ".\n  Hint: set TMPDIR to a writable directory.");
    }
    path_ = name;
    lock_ = locked(path_);
  }
  if (lock_ < 0) throw std::runtime_error(parent.string() + ": could not lock a temporary directory.");
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  ::close(lock_);
}

}  // namespace penstock::internal::cli
