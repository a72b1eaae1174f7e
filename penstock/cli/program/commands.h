// The commands that need libtorch, one file each.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace penstock::cli {

// What a command does when it is called. What libtorch throws is said without where in its sources that was.
void on_call(CLI::App& command, std::function<void()> act);

void add_split(CLI::App& command, int& exit);
void add_check(CLI::App& command, int& exit);
void add_run(CLI::App& command, int& exit);
void add_eval(CLI::App& command, int& exit);
void add_export(CLI::App& command, int& exit);
void add_train(CLI::App& command, int& exit);
void add_generate(CLI::App& command, int& exit);
void add_launch(CLI::App& command, int& exit);

}  // namespace penstock::cli
