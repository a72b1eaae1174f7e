// The threads of this process's ranks: they wait for work, do it all at once, and are joined when this ends.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "penstock/transport/gate.h"

namespace penstock {

class RankThreads {
 public:
  // `intra_op_threads` for each rank's own operators.
  RankThreads(int ranks, int intra_op_threads);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls work(rank) on each thread and returns when all have returned, or the caller has been released. It must not
  // throw. They have the caller's autocast, and a profiler that watches the caller watches them too.
  void run(std::function<void(int)> work);
  // Lets run return at once, if it waits, and the threads go on.
  void release();
  // Waits for threads that go on.
  void join();
  bool are_idle();

 private:
  struct Caller;

  void serve(int rank, int intra_op_threads);

  Gate gate_;
  // Counts the rounds of work; each thread does each of them once.
  long round_ = 0;
  int working_ = 0;
  // The caller of run.
  bool waiting_ = false;
  bool ending_ = false;
  std::function<void(int)> work_;
  std::shared_ptr<const Caller> caller_;
  std::vector<std::thread> threads_;
};

}  // namespace penstock
