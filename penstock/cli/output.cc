#include "penstock/cli/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace penstock::internal::cli {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw std::runtime_error(path + ": " + problem);
}

std::string reason() {
  return std::strerror(errno);
}

// File in the target's directory that replaces the target, or is removed. AtomicFileWriter is in a library that links
// libtorch, which this command does not load.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target) : path_(target + ".part" + std::to_string(::getpid())) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!renamed_) ::unlink(path_.c_str());
  }

  const std::string& path() const { return path_; }

  void commit(const std::string& target) {
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const bool is_synced = file >= 0 && ::fsync(file) == 0;
    const std::string error_text = reason();
    if (file >= 0) ::close(file);
    if (!is_synced) fail(target, "could not be written: " + error_text + ".");
    std::error_code error;
    std::filesystem::rename(path_, target, error);
    if (error) fail(target, "could not be written: " + error.message() + ".");
    renamed_ = true;
  }

 private:
  std::string path_;
  bool renamed_ = false;
};

}  // namespace

void write_output(const std::string& path, const std::function<void(std::ostream&)>& write) {
  if (path.empty() || path == "-") {
    // Buffered, so that an error leaves no partial output here either.
    std::ostringstream buffer;
    write(buffer);
    if (!(std::cout << buffer.view()).flush()) throw std::runtime_error("standard output could not be written.");
    return;
  }
  // A device or a pipe cannot be replaced by a rename, and is written directly.
  std::error_code ignored;
  const bool special = std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored);
  if (special) {
    if (std::filesystem::is_directory(path, ignored)) fail(path, "is a directory; give the path of a file.");
    std::ofstream out(path, std::ios::binary);
    write(out);
    if (!out.flush()) fail(path, "could not be written: " + reason() + ".");
    return;
  }
  // A symbolic link stays, and its target is replaced.
  std::error_code unresolved;
  const std::string target =
      std::filesystem::is_symlink(path, ignored) ? std::filesystem::canonical(path, unresolved).string() : path;
  if (unresolved) fail(path, "could not be written: " + unresolved.message() + ".");
  TemporaryFile temporary(target);
  {
    std::ofstream out(temporary.path(), std::ios::binary | std::ios::trunc);
    if (!out) fail(path, "could not be written: " + reason() + ".");
    write(out);
    if (!out.flush()) fail(path, "could not be written: " + reason() + ".");
  }
  const auto before = std::filesystem::status(target, ignored);
  if (std::filesystem::exists(before)) std::filesystem::permissions(temporary.path(), before.permissions(), ignored);
  temporary.commit(target);
}

void require_writable_path(const std::string& path) {
  const auto is_directory = [&](const std::filesystem::path& place) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(place, error);
    if (!std::filesystem::status_known(status)) fail(path, "cannot be written: " + error.message() + ".");
    return std::filesystem::is_directory(status);
  };
  if (is_directory(path)) fail(path, "is a directory; give the path of a file.");
  const std::filesystem::path directory = std::filesystem::path(path).parent_path();
  if (!directory.empty() && !is_directory(directory)) {
    throw std::runtime_error(path + ": cannot be written: there is no directory " + directory.string() + ".");
  }
}

std::string read_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(path, "could not be read: it is a directory.");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, "could not be read: " + reason() + ".");
  try {
    return {std::istreambuf_iterator<char>(in), {}};
  } catch (const std::ios_base::failure& error) {
    fail(path, "could not be read: " + error.code().message() + ".");
  }
}

}  // namespace penstock::internal::cli
