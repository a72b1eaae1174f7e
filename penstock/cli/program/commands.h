// Commands that need libtorch. Each has a source of its own.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace penstock::internal::cli {

// Groups the options of a command for --help, and calls `run` when the command line has been parsed. Errors of libtorch
// are rethrown without their C++ backtrace.
void on_call(CLI::App& command, std::function<void()> run);

void add_split(CLI::App& command, int& exit);
void add_check(CLI::App& command, int& exit);
void add_run(CLI::App& command, int& exit);
void add_eval(CLI::App& command, int& exit);
void add_export(CLI::App& command, int& exit);
void add_train(CLI::App& command, int& exit);
void add_generate(CLI::App& command, int& exit);
void add_launch(CLI::App& command, int& exit);

}  // namespace penstock::internal::cli
