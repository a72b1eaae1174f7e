// Finds and loads the library of a plugin. It is separate from device_plugin.h, so that its errors can be tested
// without an accelerator.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace penstock::internal {

// Describes where a plugin may be.
struct PluginSearch {
  // File name of the library.
  std::string name;
  // Environment variable with the path of the library, which takes precedence over the directories.
  std::string path_variable;
  // Directories in the order of the search. The search path of the dynamic linker follows.
  std::vector<std::filesystem::path> directories;
  // Hint for a plugin that is not installed, as a sentence without a period.
  std::string install_hint;
};

struct PluginLibrary {
  // Handle of the library, or nullptr if it is not installed.
  void* handle = nullptr;
  // Explains a null handle, with a hint.
  std::string reason = {};
};

// Returns the directories in which plugins of Penstock are installed: that of the library or executable which contains
// this function, that of the executable, ../lib/penstock relative to it, and the installation directory of this build.
std::vector<std::filesystem::path> plugin_directories();

// Loads the first library that is found. Throws std::runtime_error if a library exists and cannot be loaded, or if the
// environment variable names no file.
PluginLibrary load_plugin(const PluginSearch& search);

// Loads a library for the rest of the process. `scope` is RTLD_LOCAL or RTLD_GLOBAL. Throws std::runtime_error with the
// path, the linker's error and the hint.
void* load_library(const std::filesystem::path& path, int scope, const std::string& hint);

}  // namespace penstock::internal
