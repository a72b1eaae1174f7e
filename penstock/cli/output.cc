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

namespace penstock::cli {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error(path + ": " + what);
}

std::string reason() {
  return std::strerror(errno);
}

// A name beside the target that goes away unless it is renamed.
class Aside {
 public:
  explicit Aside(const std::string& target) : path_(target + ".part" + std::to_string(::getpid())) {}
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
  ~Aside() {
    if (!renamed_) ::unlink(path_.c_str());
  }

  const std::string& path() const { return path_; }

  void commit(const std::string& target) {
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const bool is_synced = file >= 0 && ::fsync(file) == 0;
    const std::string why = reason();
    if (file >= 0) ::close(file);
    if (!is_synced) fail(target, "could not be written: " + why + ".");
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
    // Whole or not at all here too: nobody wants half a drawing before an error.
    std::ostringstream whole;
    write(whole);
    if (!(std::cout << whole.view()).flush()) throw std::runtime_error("standard output could not be written.");
    return;
  }
  // A device or a pipe is written as it is: there is nothing to rename.
  std::error_code ignored;
  const bool special = std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored);
  if (special) {
    if (std::filesystem::is_directory(path, ignored)) fail(path, "is a folder; give the name of a file.");
    std::ofstream out(path, std::ios::binary);
    write(out);
    if (!out.flush()) fail(path, "could not be written: " + reason() + ".");
    return;
  }
  // Through a link to what it points at.
  std::error_code unresolved;
  const std::string target =
      std::filesystem::is_symlink(path, ignored) ? std::filesystem::canonical(path, unresolved).string() : path;
  if (unresolved) fail(path, "could not be written: " + unresolved.message() + ".");
  Aside aside(target);
  {
    std::ofstream out(aside.path(), std::ios::binary | std::ios::trunc);
    if (!out) fail(path, "could not be written: " + reason() + ".");
    write(out);
    if (!out.flush()) fail(path, "could not be written: " + reason() + ".");
  }
  const auto before = std::filesystem::status(target, ignored);
  if (std::filesystem::exists(before)) std::filesystem::permissions(aside.path(), before.permissions(), ignored);
  aside.commit(target);
}

void require_folder(const std::string& path) {
  const auto is_folder = [&](const std::filesystem::path& place) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(place, error);
    if (!std::filesystem::status_known(status)) fail(path, "cannot be written: " + error.message() + ".");
    return std::filesystem::is_directory(status);
  };
  if (is_folder(path)) fail(path, "is a folder; give the name of a file.");
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty() && !is_folder(folder)) {
    throw std::runtime_error(path + ": cannot be written, as there is no folder " + folder.string() + ".");
  }
}

std::string read_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(path, "could not be read: it is a folder.");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, "could not be read: " + reason() + ".");
  try {
    return {std::istreambuf_iterator<char>(in), {}};
  } catch (const std::ios_base::failure& error) {
    fail(path, "could not be read: " + error.code().message() + ".");
  }
}

}  // namespace penstock::cli
