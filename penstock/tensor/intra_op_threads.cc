#include "penstock/tensor/intra_op_threads.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace penstock::internal {
namespace {

// The functions behind at::set_num_threads that apply to one thread. They are looked up at run time, as libtorch may be
// built without OpenMP or MKL.
struct ThreadSettings {
  using SetOpenMp = void (*)(int);
  using SetMkl = int (*)(int);
  SetOpenMp set_openmp = reinterpret_cast<SetOpenMp>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  // Returns the previous number, or 0 if the thread used the global number.
  SetMkl set_mkl = reinterpret_cast<SetMkl>(::dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));

  static const ThreadSettings& get() {
    static const ThreadSettings kSettings;
    return kSettings;
  }
};

void set_for_this_thread(int threads) {
  if (const auto set = ThreadSettings::get().set_openmp) {
    set(threads);
  } else {
    at::set_num_threads(threads);
  }
}

int set_mkl_for_this_thread(int threads) {
  const auto set = ThreadSettings::get().set_mkl;
  return set == nullptr ? 0 : set(threads);
}

}  // namespace

void set_intra_op_threads(int threads) {
  at::get_num_threads();
  set_mkl_for_this_thread(threads);
  set_for_this_thread(threads);
}

// The first call of at::get_num_threads on a thread sets the number to libtorch's default, so it has to come before
// set_for_this_thread.
IntraOpThreads::IntraOpThreads(int threads)
    : before_(at::get_num_threads()), mkl_before_(set_mkl_for_this_thread(threads)) {
  set_for_this_thread(threads);
}

IntraOpThreads::~IntraOpThreads() {
  set_for_this_thread(before_);
  set_mkl_for_this_thread(mkl_before_);
}

}  // namespace penstock::internal
