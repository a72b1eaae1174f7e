// penstock launch: starts a penstock command as several process ranks on this machine.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "penstock/cli/checks.h"
#include "penstock/cli/interruption.h"
#include "penstock/cli/program/commands.h"
#include "penstock/transport/processes.h"

namespace penstock::internal::cli {

void add_launch(CLI::App& command, int& exit) {
  struct Options {
    int processes = 2;
  };
  const auto options = std::make_shared<Options>();
  command.add_option("--processes", options->processes, "Number of processes to start")
      ->option_text("N [2]")
      ->check(whole_number());
  command.prefix_command();
  command.footer("A penstock command with its options follows: penstock launch --processes 4 train --ranks 4");
  on_call(command, [options, &command, &exit] {
    const std::vector<std::string> arguments = command.remaining();
    if (arguments.empty())
      throw std::runtime_error("the command to launch is missing.\n  Hint: penstock launch --processes 4 train …");
    ProcessRanks ranks(
        {.program = "/proc/self/exe", .arguments = arguments, .ranks = options->processes, .environment = {}});
    const ForwardedInterruptions interruptions(ranks);
    const std::vector<ProcessEnd> ends = ranks.wait(Clock::now() + std::chrono::hours(24 * 365));
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      if (ends[rank].succeeded()) continue;
      // The rank has printed its own error.
      std::cerr << "penstock launch: rank " << rank << " " << to_string(ends[rank]) << "\n";
      if (exit == 0) exit = ends[rank].how == ProcessEnd::How::Exited ? ends[rank].code : 1;
    }
    if (exit != 0 && cli::interruptions() > 0) exit = interruption_code();
  });
}

}  // namespace penstock::internal::cli
