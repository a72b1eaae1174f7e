// penstock launch: a command of this one as several ranks, each a process of this machine.
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

namespace penstock::cli {

void add_launch(CLI::App& command, int& exit) {
  struct Options {
    int processes = 2;
  };
  const auto options = std::make_shared<Options>();
  command.add_option("--processes", options->processes, "Number of processes to start")
      ->option_text("N [2]")
      ->check(whole_number());
  command.prefix_command();
  command.footer("The rest is a command of penstock and its options: penstock launch --processes 4 train --ranks 4");
  on_call(command, [options, &command, &exit] {
    const std::vector<std::string> words = command.remaining();
    if (words.empty())
      throw std::runtime_error("what is to be launched?\n  Hint: penstock launch --processes 4 train …");
    ProcessRanks ranks(
        {.program = "/proc/self/exe", .arguments = words, .ranks = options->processes, .environment = {}});
    const PassedOnInterruptions interruptions(ranks);
    const std::vector<ProcessEnd> ends = ranks.wait(Clock::now() + std::chrono::hours(24 * 365));
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      if (ends[rank].succeeded()) continue;
      // Each rank has said for itself what went wrong.
      std::cerr << "penstock launch: rank " << rank << " " << to_string(ends[rank]) << "\n";
      if (exit == 0) exit = ends[rank].how == ProcessEnd::How::Exited ? ends[rank].code : 1;
    }
    if (exit != 0 && cli::interruptions() > 0) exit = interruption_code();
  });
}

}  // namespace penstock::cli
