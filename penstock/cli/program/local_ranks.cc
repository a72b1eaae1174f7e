#include "penstock/cli/program/local_ranks.h"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/cli/command.h"
#include "penstock/cli/interruption.h"
#include "penstock/cli/limits.h"
#include "penstock/cli/output.h"
#include "penstock/cli/temporary_directory.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/processes.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

namespace fs = std::filesystem;

// Environment variable with the directory, set in ranks alone.
constexpr const char* kDirectoryVariable = "PENSTOCK_RESULTS";

fs::path error_file(const fs::path& directory, int rank) {
  return directory / ("rank-" + std::to_string(rank) + ".error");
}

// Returns the command line of this process, without the program.
std::vector<std::string> arguments_of_this_process() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  arguments.erase(arguments.begin());
  return arguments;
}

}  // namespace

void print_notice(const std::string& line) {
  // A single write, as ranks share a terminal.
  std::cerr << "penstock: " + line + "\n" << std::flush;
}

struct LocalRanks::Processes {
  TemporaryDirectory directory;
  ProcessRanks ranks;
  ForwardedInterruptions interruptions;

  explicit Processes(int count)
      : ranks({.program = "/proc/self/exe",
               .arguments = arguments_of_this_process(),
               .ranks = count,
               .environment = {{kDirectoryVariable, directory.path().string()}}}),
        interruptions(ranks) {}
};

LocalRanks::LocalRanks(int count) : processes_(std::make_unique<Processes>(count)) {
  postpone_time_limit(std::chrono::seconds(5));
}
LocalRanks::~LocalRanks() = default;

const fs::path& LocalRanks::directory() const {
  return processes_->directory.path();
}

void LocalRanks::wait(Deadline deadline) {
  const std::vector<ProcessEnd> ends = processes_->ranks.wait(deadline);
  // The message of a rank says more than the exit status of another rank, which it may have caused.
  for (const bool has_message : {true, false}) {
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      if (ends[rank].succeeded()) continue;
      const fs::path error = error_file(directory(), static_cast<int>(rank));
      if (has_message && fs::exists(error)) throw std::runtime_error(read_file(error));
      if (!has_message) throw std::runtime_error("rank " + std::to_string(rank) + " " + to_string(ends[rank]) + ".");
    }
  }
}

bool LocalRanks::is_rank() {
  return std::getenv(kDirectoryVariable) != nullptr;
}

void LocalRanks::run(const std::function<void(const fs::path& directory, int rank)>& function) {
  const fs::path directory = std::getenv(kDirectoryVariable);
  const int rank = read_environment().rank;
  terminate_with_parent();
  try {
    function(directory, rank);
    std::exit(kSuccess);
  } catch (const std::exception& error) {
    std::ofstream(error_file(directory, rank)) << reason_of(error);
    std::exit(kUsageError);
  }
}

}  // namespace penstock::internal::cli
