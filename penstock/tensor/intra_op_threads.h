// Sets the number of intra-op threads of the calling thread in a scope.
#pragma once

namespace penstock::internal {

// Sets the number for the rest of the calling thread's life.
void set_intra_op_threads(int threads);

// Sets the number of threads that operators use when they are called on this thread, and restores it in the destructor,
// which must run on the same thread. Unlike at::set_num_threads, does not change the default of other threads.
class IntraOpThreads {
 public:
  explicit IntraOpThreads(int threads);
  ~IntraOpThreads();
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  int before_;
  int mkl_before_;
};

}  // namespace penstock::internal
