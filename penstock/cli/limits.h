// Limits of this process's memory and time, and its end when a library throws where nobody can catch it.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

namespace penstock::cli {

// --memory-limit and --time-limit, for models of strangers. A model that goes beyond one of them ends the command with an
// error.
struct LimitOptions {
  std::string memory;
  double seconds = 0;

  void add_to(CLI::App& command);
  // Sets the limits of this process, the first time that it is called.
  void apply() const;
};

// Gives the process this much more time than --time-limit, so that the processes that it waits for end before it.
void postpone_time_limit(std::chrono::seconds more);

// Lets the process open as many files as the system allows it to, and say in words why it ends when a library throws on a
// thread of its own.
void prepare_process();

}  // namespace penstock::cli
