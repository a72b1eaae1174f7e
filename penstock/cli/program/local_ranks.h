// Process ranks of a command on this machine: the command starts itself once for each rank, with the same arguments.
// The starting process reports the error of the first rank that failed, and the ranks themselves print none.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "penstock/base/deadline.h"

namespace penstock::internal::cli {

// Prints a line about the ranks to standard error.
void print_notice(const std::string& line);

// Starts the ranks in the constructor, and ends them in the destructor.
class LocalRanks {
 public:
  explicit LocalRanks(int count);
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Directory that the ranks write their results to. It exists as long as this object.
  const std::filesystem::path& directory() const;
  // Blocks until all ranks have ended. Throws std::runtime_error with the message of the first rank that failed, or
  // with its exit status if it left no message.
  void wait(Deadline deadline);

  // Returns true in a process that LocalRanks has started.
  static bool is_rank();
  // Runs `function` with the directory and the rank of this process, and exits. An exception becomes the rank's
  // message.
  [[noreturn]] static void run(const std::function<void(const std::filesystem::path& directory, int rank)>& function);

 private:
  struct Processes;
  std::unique_ptr<Processes> processes_;
};

}  // namespace penstock::internal::cli
