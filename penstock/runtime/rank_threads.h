// The threads of this process's ranks: they wait for work, do it all at once, and are joined when this ends.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "penstock/transport/monitor.h"

namespace penstock::internal {

class RankThreads {
 public:
  // `intra_op_threads` for each rank's own operators. Throws std::runtime_error when a thread cannot be started.
  RankThreads(int ranks, int intra_op_threads);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls work(rank) on each thread and returns when all have returned. It must not throw. They have the caller's
  // autocast, and a profiler that watches the caller watches them too.
  void run(std::function<void(int)> work);

  // The same in parts, for a caller that another thread may release: first arm(), then start(), then wait().
  void arm();
  // Waits for work that was started before.
  void start(std::function<void(int)> work);
  // Blocks until all threads have returned from their work, or release() has been called since arm(), before or during
  // this. Returns true when they have returned.
  bool wait();
  // Lets wait() return at once, and the threads continue.
  void release();
  // Blocks until all threads have returned from their work.
  void join();
  bool are_idle();

  // Ends the threads, when the process exits. Gives up at the deadline, if they are still at work then. On one of the
  // threads themselves it waits for the others, and ends none.
  void stop(Deadline deadline);

 private:
  struct Caller;

  void serve(int rank, int intra_op_threads);
  // Tells the threads to end after their current work, and joins them.
  void end_threads() PENSTOCK_EXCLUDES(monitor_);
  void join_threads() PENSTOCK_EXCLUDES(monitor_);

  // Protects the state that the caller's thread and the rank threads share. A leaf lock: no other is acquired while it is held.
  Monitor monitor_;
  // Counts the rounds of work. Each thread runs each round once.
  long round_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Number of threads that have not finished the current round.
  int working_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  bool released_ PENSTOCK_GUARDED_BY(monitor_) = false;
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // Constant while working_ > 0, so the threads call it without the lock.
  std::function<void(int)> work_ PENSTOCK_GUARDED_BY(monitor_);
  std::shared_ptr<const Caller> caller_ PENSTOCK_GUARDED_BY(monitor_);
  std::vector<std::thread> threads_;
};

}  // namespace penstock::internal
