// Number of threads that operators use on the calling thread, for as long as this lives. at::set_num_threads would also
// become the default of every thread of the process that has not run an operator yet, and such threads are the program's.
#pragma once

namespace penstock::internal {

class IntraOpThreads {
 public:
  explicit IntraOpThreads(int threads);
  // On the thread that has made it.
  ~IntraOpThreads();
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  int before_;
  int mkl_before_;
};

}  // namespace penstock::internal
