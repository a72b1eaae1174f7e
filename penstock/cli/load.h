// Commands that need libtorch live in a library of their own, which is loaded when one of them is called: to load libtorch
// takes longer than most questions about schedules.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace penstock::cli {

// Adds all of them by name, for the help; and to the one that is `called`, its options. Throws std::runtime_error if the
// library is not there.
void add_program_commands(CLI::App& app, const std::string& called, int& exit);

}  // namespace penstock::cli
