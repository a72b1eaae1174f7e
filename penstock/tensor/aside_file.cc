#include "penstock/tensor/aside_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace penstock::internal {

void AsideFile::fail(const std::string& what) const {
  throw Failure(target_ + ": " + what + ": " + std::generic_category().message(errno) + ".");
}

AsideFile::AsideFile(const std::string& target) : target_(target) {
  const std::filesystem::path folder = std::filesystem::path(target).parent_path();
  folder_ = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0) fail("could not be written, as its folder could not be opened");
  // Tries names until one is free: a process of the same number may have left some behind.
  static std::atomic<unsigned> count = 0;
  while (file_ < 0) {
    name_ = ".penstock-" + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".part";
    file_ = ::openat(folder_, name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ >= 0 || errno == EEXIST) continue;
    const int reason = errno;
    ::close(folder_);
    errno = reason;
    fail("could not be written");
  }
}

AsideFile::~AsideFile() {
  if (file_ >= 0) ::close(file_);
  if (!renamed_) ::unlinkat(folder_, name_.c_str(), 0);
  ::close(folder_);
}

void AsideFile::write(const void* data, std::size_t size) {
  constexpr std::size_t kMost = std::size_t{1} << 30U;
  for (const char* next = static_cast<const char*>(data); size > 0;) {
    const ssize_t written = ::write(file_, next, std::min(size, kMost));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("could not be written");
    next += written;
    size -= static_cast<std::size_t>(written);
  }
}

void AsideFile::sync_and_rename() {
  const std::string name = std::filesystem::path(target_).filename();
  if (::fsync(file_) != 0 || ::close(std::exchange(file_, -1)) != 0 ||
      ::renameat(folder_, name_.c_str(), folder_, name.c_str()) != 0) {
    fail("could not be written");
  }
  renamed_ = true;
  // Some file systems cannot sync a folder, and say so with EINVAL.
  if (::fsync(folder_) != 0 && errno != EINVAL) fail("was written, but its folder not synced");
}

}  // namespace penstock::internal
