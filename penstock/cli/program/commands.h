// The commands on exported models, one file each.
#pragma once

#include <CLI/CLI.hpp>

namespace penstock::cli {

void add_split(CLI::App& command, int& exit);
void add_check(CLI::App& command, int& exit);
void add_run(CLI::App& command, int& exit);

}  // namespace penstock::cli
