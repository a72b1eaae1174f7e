#include "penstock/train/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <ranges>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = ".penstock-lock";

std::string reason(int code) {
  return std::generic_category().message(code);
}

std::string megabytes(std::uintmax_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text.data();
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

// Returns "process 4711 on HOST", read from the lock file that the holder has written.
std::string holder_of(int lock) {
  std::array<char, 512> bytes{};
  const ssize_t size = ::pread(lock, bytes.data(), bytes.size(), 0);
  const std::string_view text(bytes.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  const std::size_t space = text.find(' ');
  const std::size_t end = text.find('\n');
  if (space == std::string_view::npos || end == std::string_view::npos || end < space) return "another process";
  const std::string_view host = text.substr(space + 1, end - space - 1);
  const std::string process = "process " + std::string(text.substr(0, space));
  return host == host_name() ? process : process + " on " + std::string(host);
}

}  // namespace

void RunDirectory::fail(const std::string& problem) const {
  throw RunDirectoryError(concat(path_, ": ", problem));
}

RunDirectory::RunDirectory(const std::string& path) : path_(path) {
  try {
    create();
    lock();
  } catch (...) {
    release();
    throw;
  }
}

RunDirectory::~RunDirectory() {
  release();
}

void RunDirectory::create() {
  if (path_.empty()) fail("names no directory.");
  std::error_code error;
  std::vector<fs::path> missing;
  fs::path place = fs::absolute(path_, error).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  const auto is_there = [&] {
    const bool found = fs::exists(place, error);
    if (error) fail("could not be created: " + place.string() + ": " + error.message() + ".");
    return found;
  };
  for (; place.has_relative_path() && !is_there(); place = place.parent_path()) missing.push_back(place);
  for (const fs::path& next : std::views::reverse(missing)) {
    if (fs::create_directory(next, error)) created_.push_back(next);
    if (error) {
      fail("could not be created: " + next.string() + ": " + error.message() +
           ".\n  Hint: choose a directory that can be written to.");
    }
  }
  const fs::file_status status = fs::status(path_, error);
  if (!fs::status_known(status)) fail("could not be read: " + error.message() + ".");
  if (!fs::is_directory(status)) {
    fail("is not a directory.\n  Hint: choose another path, or remove the file.");
  }
}

void RunDirectory::lock() {
  lock_path_ = (fs::path(path_) / kLock).string();
  const auto could_not_write = [&](int code) {
    fail("cannot be written to: " + reason(code) + ".\n  Hint: choose a directory that can be written to.");
  };
  for (;;) {
    lock_ = ::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (lock_ < 0) could_not_write(errno);
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        const std::string holder = holder_of(lock_);
        // Close it here, because release() would remove the lock file of the other run.
        ::close(std::exchange(lock_, -1));
        fail("another run writes to it: " + holder + ".\n  Hint: wait until it ends, or choose another directory.");
      }
      if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK) could_not_write(errno);
    }
    // A run that ended after the open has removed this file, and a third run may have created a new one.
    struct stat opened = {};
    struct stat named = {};
    if (::fstat(lock_, &opened) != 0) could_not_write(errno);
    const bool has_name = ::stat(lock_path_.c_str(), &named) == 0;
    if (!has_name && errno != ENOENT) could_not_write(errno);
    if (has_name && opened.st_ino == named.st_ino && opened.st_dev == named.st_dev) break;
    ::close(std::exchange(lock_, -1));
  }
  if (::ftruncate(lock_, 0) != 0) could_not_write(errno);
  const std::string text = concat(::getpid(), " ", host_name(), "\n");
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t written = ::write(lock_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) could_not_write(errno);
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
}

void RunDirectory::require_space(std::uintmax_t bytes, const std::string& contents) const {
  std::error_code unknown;
  const fs::space_info space = fs::space(path_, unknown);
  if (unknown || space.available >= bytes) return;
  fail(concat("has ", megabytes(space.available), " free, and ", contents, " take about ", megabytes(bytes),
              ".\n  Hint: free some space, choose a directory on another disk, or keep fewer checkpoints."));
}

// Allocates no memory, because it also runs after std::bad_alloc.
void RunDirectory::release() noexcept {
  if (lock_ >= 0) {
    // The file is removed while it is still locked. A process that has opened it notices that the path no longer leads
    // to this file.
    ::unlink(lock_path_.c_str());
    ::close(std::exchange(lock_, -1));
  }
  for (const fs::path& next : std::views::reverse(created_)) {
    if (::rmdir(next.c_str()) != 0) break;
  }
  created_.clear();
}

}  // namespace penstock::internal
