// What the subcommands and main share: exit codes, and how a subcommand hangs itself into the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace penstock::cli {

enum ExitCode : int {
  kYes = 0,
  // The answer is no: a schedule that is not valid.
  kNo = 1,
  // Bad use: a wrong word, a file that cannot be read.
  kBadUse = 2,
};

// Adds `penstock schedule …`. What is asked for runs when the line has been parsed, and leaves its exit code in `exit`.
void add_schedule_command(CLI::App& app, int& exit);

}  // namespace penstock::cli
