// Threads of the ranks of this process. They wait for work, run it all at the same time, and are joined by the
// destructor.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "penstock/transport/monitor.h"

namespace penstock::internal {

class RankThreads {
 public:
  // Starts one thread for each rank, with `intra_op_threads` threads for its operators. Throws std::runtime_error if a
  // thread cannot be started.
  RankThreads(int ranks, int intra_op_threads);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls work(rank) on each thread, and returns when all calls have returned. `work` must not throw. The threads take
  // over the caller's autocast state, and a profiler that records the caller records them too.
  void run(std::function<void(int)> work);

  // The same in three calls, for a caller that another thread may release: arm(), then start(), then wait().
  void arm();
  // Blocks until earlier work has been finished, and starts the threads.
  void start(std::function<void(int)> work);
  // Blocks until all threads have finished, or release() has been called since arm(). Returns true if they have
  // finished.
  bool wait();
  // Makes wait() return at once; the threads continue.
  void release();
  // Blocks until all threads have finished.
  void join();
  bool are_idle();

  // Ends the threads when the process exits. Gives up if they have not finished by the deadline. If one of the threads
  // calls it, it waits for the others and ends none.
  void stop(Deadline deadline);

 private:
  struct Caller;

  void serve(int rank, int intra_op_threads);
  // Tells the threads to end after their current work, and joins them.
  void end_threads() PENSTOCK_EXCLUDES(monitor_);
  void join_threads() PENSTOCK_EXCLUDES(monitor_);

  // Protects the state that the caller's thread and the rank threads share. A leaf lock: no other is acquired while it
  // is held.
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
