#include "penstock/cli/program/own_ranks.h"

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

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

// Names the folder to ranks.
constexpr const char* kFolder = "PENSTOCK_RESULTS";

fs::path error_of(const fs::path& folder, int rank) {
  return folder / ("rank-" + std::to_string(rank) + ".error");
}

// The words of this process's own command line.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  words.erase(words.begin());
  return words;
}

}  // namespace

void say_waiting(const std::string& line) {
  // One write, as ranks share a terminal.
  std::cerr << "penstock: " + line + "\n" << std::flush;
}

struct OwnRanks::Processes {
  TemporaryDirectory folder;
  ProcessRanks ranks;
  PassedOnInterruptions interruptions;

  explicit Processes(int count)
      : ranks({.program = "/proc/self/exe",
               .arguments = own_words(),
               .ranks = count,
               .environment = {{kFolder, folder.path().string()}}}),
        interruptions(ranks) {}
};

OwnRanks::OwnRanks(int count) : processes_(std::make_unique<Processes>(count)) {
  postpone_time_limit(std::chrono::seconds(5));
}
OwnRanks::~OwnRanks() = default;

const fs::path& OwnRanks::folder() const {
  return processes_->folder.path();
}

void OwnRanks::wait(Deadline deadline) {
  const std::vector<ProcessEnd> ends = processes_->ranks.wait(deadline);
  // What a rank says of itself tells more than how another one ended for it.
  for (const bool said : {true, false}) {
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      if (ends[rank].succeeded()) continue;
      const fs::path error = error_of(folder(), static_cast<int>(rank));
      if (said && fs::exists(error)) throw std::runtime_error(read_file(error));
      if (!said) throw std::runtime_error("rank " + std::to_string(rank) + " " + to_string(ends[rank]) + ".");
    }
  }
}

bool OwnRanks::is_rank() {
  return std::getenv(kFolder) != nullptr;
}

void OwnRanks::run(const std::function<void(const fs::path& folder, int rank)>& act) {
  const fs::path folder = std::getenv(kFolder);
  const int rank = read_environment().rank;
  terminate_with_parent();
  try {
    act(folder, rank);
    std::exit(kYes);
  } catch (const std::exception& error) {
    std::ofstream(error_of(folder, rank)) << reason_of(error);
    std::exit(kBadUse);
  }
}

}  // namespace penstock::cli
