// Starts a program as several ranks of this machine, and fails when one of them does.
//
//   penstock_launch 4 penstock_gloo_test --gtest_filter=Gloo.*
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "penstock/transport/processes.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: penstock_launch RANKS PROGRAM [ARGUMENT…]\n";
    return 2;
  }
  try {
    penstock::ProcessRanks ranks({.program = argv[2],
                                  .arguments = std::vector<std::string>(argv + 3, argv + argc),
                                  .ranks = std::atoi(argv[1]),
                                  .environment = {},
                                  .grace_period = std::chrono::seconds(30)});
    int failed = 0;
    const auto ends = ranks.wait(penstock::Clock::now() + std::chrono::minutes(30));
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      if (ends[rank].succeeded()) continue;
      std::cerr << "rank " << rank << " " << to_string(ends[rank]) << "\n";
      failed = 1;
    }
    return failed;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
