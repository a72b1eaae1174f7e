#include "penstock/tensor/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace penstock::internal {
namespace {

std::string message_of(const std::string& path, MappingFailure::Why why, int code) {
  switch (why) {
    case MappingFailure::Why::Folder: return path + ": is a folder; give the name of a file.";
    case MappingFailure::Why::NotRegular: return path + ": is no regular file, and so cannot be mapped.";
    case MappingFailure::Why::Open:
      return path + ": could not be opened: " + std::generic_category().message(code) + ".";
    case MappingFailure::Why::Read:
      return path + ": could not be read: " +
             (code == 0 ? "it has become shorter meanwhile" : std::generic_category().message(code)) + ".";
    case MappingFailure::Why::Map: break;
  }
  return path + ": could not be mapped: " + std::generic_category().message(code) + ".";
}

}  // namespace

MappingFailure::MappingFailure(const std::string& path, Why why, int code)
    : std::runtime_error(message_of(path, why, code)), why_(why), code_(code) {}

MappedFile::MappedFile(const std::string& path, FileAccess access) {
  // Without O_NONBLOCK, a pipe would be waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat status = {};
  const auto give_up = [&](MappingFailure::Why why) {
    const bool has_reason =
        why == MappingFailure::Why::Open || why == MappingFailure::Why::Map || why == MappingFailure::Why::Read;
    const int code = has_reason ? errno : 0;
    if (file >= 0) ::close(file);
    if (data_ != nullptr) ::munmap(data_, size_);
    throw MappingFailure(path, why, code);
  };
  if (file < 0 || ::fstat(file, &status) != 0) give_up(MappingFailure::Why::Open);
  if (S_ISDIR(status.st_mode)) give_up(MappingFailure::Why::Folder);
  if (!S_ISREG(status.st_mode)) give_up(MappingFailure::Why::NotRegular);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ > 0) {
    // Pages count against the memory that the system promises only when they are written.
    const bool is_copy = access == FileAccess::Read;
    void* const data = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_NORESERVE | (is_copy ? MAP_ANONYMOUS : 0), is_copy ? -1 : file, 0);
    if (data == MAP_FAILED) give_up(MappingFailure::Why::Map);
    data_ = static_cast<char*>(data);
    for (std::size_t done = 0; is_copy && done < size_;) {
      const ssize_t count = ::pread(file, data_ + done, size_ - done, static_cast<off_t>(done));
      if (count < 0 && errno == EINTR) continue;
      if (count == 0) errno = 0;
      if (count <= 0) give_up(MappingFailure::Why::Read);
      done += static_cast<std::size_t>(count);
    }
  }
  ::close(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace penstock::internal
