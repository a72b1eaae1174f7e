#include "penstock/tensor/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

using Reason = MappingError::Reason;

std::string message_of(const std::string& path, Reason reason, int code) {
  const std::string system_message = std::generic_category().message(code);
  switch (reason) {
    case Reason::Directory: return concat(path, ": is a directory; give the name of a file.");
    case Reason::NotRegular: return concat(path, ": is not a regular file, and so cannot be mapped.");
    case Reason::Open: return concat(path, ": could not be opened: ", system_message, ".");
    case Reason::Read:
      return concat(path, ": could not be read: ", code == 0 ? "it was truncated meanwhile" : system_message, ".");
    case Reason::Map: break;
  }
  return concat(path, ": could not be mapped: ", system_message, ".");
}

}  // namespace

MappingError::MappingError(const std::string& path, Reason reason, int code)
    : std::runtime_error(message_of(path, reason, code)), reason_(reason), code_(code) {}

MappedFile::MappedFile(const std::string& path, FileAccess access) : access_(access) {
  // Without O_NONBLOCK, opening a named pipe would block until it has a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat status = {};
  const auto fail = [&](Reason reason) {
    const bool has_code = reason == Reason::Open || reason == Reason::Map || reason == Reason::Read;
    const int code = has_code ? errno : 0;
    if (file >= 0) ::close(file);
    if (data_ != nullptr) ::munmap(data_, size_);
    throw MappingError(path, reason, code);
  };
  if (file < 0 || ::fstat(file, &status) != 0) fail(Reason::Open);
  if (S_ISDIR(status.st_mode)) fail(Reason::Directory);
  if (!S_ISREG(status.st_mode)) fail(Reason::NotRegular);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ > 0) {
    // With MAP_NORESERVE a page counts against the system's memory limit only when it is written.
    const bool is_copy = access == FileAccess::Read;
    const int protection = PROT_READ | (access == FileAccess::MapReadOnly ? 0 : PROT_WRITE);
    void* const data = ::mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_NORESERVE | (is_copy ? MAP_ANONYMOUS : 0),
                              is_copy ? -1 : file, 0);
    if (data == MAP_FAILED) fail(Reason::Map);
    data_ = static_cast<char*>(data);
    for (std::size_t done = 0; is_copy && done < size_;) {
      const ssize_t count = ::pread(file, data_ + done, size_ - done, static_cast<off_t>(done));
      if (count < 0 && errno == EINTR) continue;
      if (count == 0) errno = 0;
      if (count <= 0) fail(Reason::Read);
      done += static_cast<std::size_t>(count);
    }
  }
  ::close(file);
}

void MappedFile::release_pages(std::string_view part) const {
  if (access_ != FileAccess::MapReadOnly || part.empty()) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(part.data());
  const std::uintptr_t begin = (first + page - 1) / page * page;
  const std::uintptr_t end = (first + part.size()) / page * page;
  // A failure costs memory only.
  if (begin < end) ::madvise(data_ + (begin - reinterpret_cast<std::uintptr_t>(data_)), end - begin, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace penstock::internal
