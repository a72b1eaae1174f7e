#include "penstock/transport/plugin_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <system_error>

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRebuildHint =
    "rebuild the plugin with the libtorch that this program uses, and install the libraries that it needs.";

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

}  // namespace

std::vector<fs::path> plugin_directories() {
  std::vector<fs::path> directories;
  const auto add = [&directories](const fs::path& directory) {
    const fs::path normal = directory.lexically_normal();
    if (std::find(directories.begin(), directories.end(), normal) == directories.end()) directories.push_back(normal);
  };
  std::error_code error;
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&plugin_directories), &info) != 0 && info.dli_fname != nullptr) {
    const fs::path self = fs::absolute(info.dli_fname, error);
    // The name of an executable is that of its command, which may have been found on PATH.
    if (is_file(self)) add(self.parent_path());
  }
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    add(executable.parent_path());
    add(executable.parent_path() / ".." / "lib" / "penstock");
  }
  add(PENSTOCK_PLUGIN_DIRECTORY);
  return directories;
}

void* load_library(const fs::path& path, int scope, const std::string& hint) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | scope);
  if (library != nullptr) return library;
  throw std::runtime_error(path.string() + " cannot be loaded: " + ::dlerror() + ".\n  Hint: " + hint);
}

PluginLibrary load_plugin(const PluginSearch& search) {
  if (const char* const path = std::getenv(search.path_variable.c_str()); path != nullptr && *path != '\0') {
    if (!is_file(path)) {
      throw std::runtime_error(search.path_variable + " names no file: '" + path +
                               "'.\n  Hint: set it to the path of " + search.name + ", or unset it.");
    }
    return {.handle = load_library(fs::absolute(path), RTLD_LOCAL, kRebuildHint)};
  }
  std::string places;
  for (const fs::path& directory : search.directories) {
    if (is_file(directory / search.name)) {
      return {.handle = load_library(directory / search.name, RTLD_LOCAL, kRebuildHint)};
    }
    places += directory.string() + ", ";
  }
  void* const library = ::dlopen(search.name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return {.handle = library};
  const std::string error = ::dlerror();
  // If no directory of the search path has the library, the error begins with its name; if it cannot be loaded, with
  // its path or the name of a library that it needs.
  if (!error.starts_with(search.name + ": cannot open shared object file")) {
    throw std::runtime_error(search.name + " cannot be loaded: " + error + ".\n  Hint: " + kRebuildHint);
  }
  return {.reason = "there is no " + search.name + " in " + places +
                    "or the search path of the dynamic linker.\n  Hint: " + search.install_hint + ", or set " +
                    search.path_variable + " to the path of the plugin."};
}

}  // namespace penstock::internal
