#include "penstock/cli/load.h"

#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <stdexcept>

#include "penstock/cli/command.h"

namespace penstock::internal::cli {
namespace {

// Loads the library, which stays loaded until the process ends.
AddProgramCommand* load() {
  constexpr const char* name = "libpenstock_programs.so";
  const std::filesystem::path directory = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::array places{directory / name, directory / ".." / "lib" / "penstock" / name};
  std::string reason;
  for (const std::filesystem::path& place : places) {
    if (!std::filesystem::exists(place)) continue;
    void* const library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const found = library == nullptr ? nullptr : ::dlsym(library, kAddProgramCommand);
    if (found != nullptr) return reinterpret_cast<AddProgramCommand*>(found);
    reason = ::dlerror();
  }
  if (reason.empty()) {
    throw std::runtime_error("this command needs libtorch, and penstock was built without it: there is no " +
                             places.front().string() + ".");
  }
  throw std::runtime_error("libtorch cannot be loaded: " + reason);
}

}  // namespace

void add_program_commands(CLI::App& app, const std::string& called, int& exit) {
  for (const ProgramCommand& command : kProgramCommands) {
    CLI::App* const added = app.add_subcommand(command.name, command.description);
    if (called == command.name) load()(added, &exit);
  }
}

}  // namespace penstock::internal::cli
