// Ranks of a command that are processes of their own: this command once more for each rank, with the same words. What goes
// wrong in one of them is said once, by the process that has started them.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "penstock/base/deadline.h"

namespace penstock::cli {

// Writes to standard error that this rank waits for others.
void say_waiting(const std::string& line);

class OwnRanks {
 public:
  explicit OwnRanks(int count);
  ~OwnRanks();
  OwnRanks(const OwnRanks&) = delete;
  OwnRanks& operator=(const OwnRanks&) = delete;

  // Where ranks leave what the command wants of them; it goes with this.
  const std::filesystem::path& folder() const;
  // Waits for all of them. Throws std::runtime_error with what the first of them said that failed, or how it ended.
  void wait(Deadline deadline);

  // Whether this process is a rank that another one has started so.
  static bool is_rank();
  // What a rank does: it gets the folder and its number, and then the process ends.
  [[noreturn]] static void run(const std::function<void(const std::filesystem::path& folder, int rank)>& act);

 private:
  struct Processes;
  std::unique_ptr<Processes> processes_;
};

}  // namespace penstock::cli
