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

// The commands that need libtorch; program/commands.cc adds them.
struct ProgramCommand {
  const char* name;
  const char* description;
};
inline constexpr ProgramCommand kProgramCommands[] = {
    {"train", "Train a model in a pipeline: a small GPT, or an exported model"},
    {"generate", "Generate text with a trained GPT"},
    {"launch", "Run a command as several ranks, each a process of this machine"},
    {"split", "Cut an exported model into stages, and show them with their boundary values"},
    {"check", "Compare outputs and gradients of an exported model in a pipeline with those of one process"},
    {"run", "Run an exported model in a pipeline: inference"},
    {"eval", "Evaluate an exported model on data: loss, accuracy and perplexity"},
    {"export", "Export trained weights as safetensors, or as an exported model"},
};
// In the library that is loaded for them: adds what is needed for one of them, by its name.
constexpr const char* kAddProgramCommand = "penstock_add_program_command";
using AddProgramCommand = void(CLI::App* command, int* exit);

}  // namespace penstock::cli
