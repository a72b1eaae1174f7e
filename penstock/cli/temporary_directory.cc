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

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "penstock-";
constexpr std::size_t kRandom = 6;

// Returns a descriptor that holds the lock of a directory, or -1 if another process has it or it is gone.
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

// Removes the directories of processes that were killed.
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
  // Another process that looks for leftovers may take a new one for such, before it is locked.
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts && lock_ < 0; ++attempt) {
    std::string name = (parent / kPrefix).string() + std::string(kRandom, 'X');
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error(parent.string() + ": no temporary directory can be made here: " +
                               std::generic_category().message(errno) + ".\n  Hint: TMPDIR names another place.");
    }
    path_ = name;
    lock_ = locked(path_);
  }
  if (lock_ < 0) throw std::runtime_error(parent.string() + ": no temporary directory can be locked here.");
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  ::close(lock_);
}

}  // namespace penstock::cli
