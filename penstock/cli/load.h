// Loads the library that has the commands that need libtorch, when one of them is called: loading libtorch takes longer
// than most `penstock schedule` commands.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace penstock::internal::cli {

// Adds all of these commands by name, so that --help lists them, and the options of the one that is `called`. Throws
// std::runtime_error if the library cannot be loaded.
void add_program_commands(CLI::App& app, const std::string& called, int& exit);

}  // namespace penstock::internal::cli
