// Limits the memory and time of this process, and reports exceptions that nothing catches.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

namespace penstock::internal::cli {

// --memory-limit and --time-limit, for untrusted models. A model that exceeds one of them ends the command with an error.
struct LimitOptions {
  std::string memory;
  double seconds = 0;

  void add_to(CLI::App& command);
  // Sets the limits of this process. Only the first call has an effect.
  void apply() const;
};

// Extends the time limit of this process, so that the process ranks that it waits for reach theirs first.
void postpone_time_limit(std::chrono::seconds more);

// Raises the soft limit of file descriptors to the hard limit, and installs a terminate handler that prints the error
// when a library throws on a thread of its own.
void prepare_process();

}  // namespace penstock::internal::cli
