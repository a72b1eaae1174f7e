// Exit codes, and the functions that add subcommands to the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace penstock::internal::cli {

enum ExitCode : int {
  kSuccess = 0,
  // The command ran, and what it checked is wrong: a schedule that is not valid, results that differ.
  kCheckFailed = 1,
  // A wrong option or argument, a file that cannot be read or written, or any other error.
  kUsageError = 2,
};

// Adds `penstock schedule …`. The subcommand runs when the command line has been parsed, and sets `exit` to its exit
// code.
void add_schedule_command(CLI::App& app, int& exit);

// A command that needs libtorch. program/commands.cc adds its options.
struct ProgramCommand {
  const char* name;
  const char* description;
};
inline constexpr ProgramCommand kProgramCommands[] = {
    {"train", "Train a model in a pipeline: a small GPT, or an exported model"},
    {"generate", "Generate text with a trained GPT"},
    {"launch", "Start a command as several process ranks on this machine"},
    {"split", "Split an exported model into stages, and show the values that cross their boundaries"},
    {"check", "Compare outputs and gradients of a pipelined model with those of one process"},
    {"run", "Run inference with an exported model in a pipeline"},
    {"eval", "Evaluate an exported model on data: loss, accuracy and perplexity"},
    {"export", "Export trained weights as safetensors, or as an exported model"},
};
// Name and type of the function in the loaded library that adds options and callback to the command of its name.
constexpr const char* kAddProgramCommand = "penstock_add_program_command";
using AddProgramCommand = void(CLI::App* command, int* exit);

}  // namespace penstock::internal::cli
