#include "penstock/tensor/atomic_file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::internal {

void AtomicFileWriter::fail(const std::string& problem) const {
  throw Error(concat(target_, ": ", problem, ": ", std::generic_category().message(errno), "."));
}

AtomicFileWriter::AtomicFileWriter(const std::string& target) : target_(target) {
  const std::filesystem::path directory = std::filesystem::path(target).parent_path();
  directory_ = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory_ < 0) fail("could not be written, as its directory could not be opened");
  // A process with the same id may have left files behind, so try names until one is free.
  static std::atomic<unsigned> count = 0;
  while (file_ < 0) {
    temporary_name_ = concat(".penstock-", ::getpid(), "-", count++, ".part");
    file_ = ::openat(directory_, temporary_name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ >= 0 || errno == EEXIST) continue;
    const int code = errno;
    ::close(directory_);
    errno = code;
    fail("could not be written");
  }
}

AtomicFileWriter::~AtomicFileWriter() {
  if (file_ >= 0) ::close(file_);
  if (!is_committed_) ::unlinkat(directory_, temporary_name_.c_str(), 0);
  ::close(directory_);
}

void AtomicFileWriter::write(const void* data, std::size_t size) {
  constexpr std::size_t kMaxBytesPerCall = std::size_t{1} << 30U;
  for (const char* next = static_cast<const char*>(data); size > 0;) {
    const ssize_t written = ::write(file_, next, std::min(size, kMaxBytesPerCall));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("could not be written");
    next += written;
    size -= static_cast<std::size_t>(written);
  }
}

void AtomicFileWriter::commit() {
  const std::string name = std::filesystem::path(target_).filename();
  if (::fsync(file_) != 0 || ::close(std::exchange(file_, -1)) != 0 ||
      ::renameat(directory_, temporary_name_.c_str(), directory_, name.c_str()) != 0) {
    fail("could not be written");
  }
  is_committed_ = true;
  // File systems that cannot sync a directory answer with EINVAL.
  if (::fsync(directory_) != 0 && errno != EINVAL) fail("was written, but its directory could not be synced");
}

}  // namespace penstock::internal
