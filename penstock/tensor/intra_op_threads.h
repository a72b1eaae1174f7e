// The number of threads of operators on this thread, for as long as this lives. Of libtorch's threads, those that have been
// woken once spin for a while after each operator: beside ranks that compute, fewer are faster.
#pragma once

#include <ATen/Parallel.h>

namespace penstock {

class IntraOpThreads {
 public:
  explicit IntraOpThreads(int threads) : before_(at::get_num_threads()) { at::set_num_threads(threads); }
  ~IntraOpThreads() { at::set_num_threads(before_); }
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  int before_;
};

}  // namespace penstock
