// The way into the library that main loads.
#include "penstock/cli/program/commands.h"

#include "penstock/cli/command.h"

extern "C" __attribute__((visibility("default"))) void penstock_add_program_command(CLI::App* command, int* exit) {
  const std::string& name = command->get_name();
  if (name == "split") penstock::cli::add_split(*command, *exit);
  if (name == "check") penstock::cli::add_check(*command, *exit);
  if (name == "run") penstock::cli::add_run(*command, *exit);
}
