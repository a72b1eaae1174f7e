// Tests that ranks that start at the same time compute the same results. While one thread of a process makes the first
// call of MKL's vector functions (tanh, sqrt, sin, …), results of another thread may be exact to three or four digits
// only. A process has one first call, so this program starts itself many times.
#include <ATen/ATen.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <vector>

#include "penstock/runtime/rank_threads.h"

namespace penstock::internal::testing {
namespace {

constexpr int kProcesses = 100;
constexpr int kRanks = 2;

bool ranks_agree() {
  const at::Tensor numbers = at::arange(1, 4097).to(at::kFloat) / 4097;
  // A matrix product, as in a model: it initialises other parts of MKL.
  at::mm(numbers.view({64, 64}), numbers.view({64, 64}));
  std::vector<at::Tensor> results(kRanks);
  RankThreads ranks(kRanks, 1);
  std::atomic<int> there = 0;
  ranks.run([&](int rank) {
    numbers.add(1);
    ++there;
    while (there < kRanks);
    results[static_cast<std::size_t>(rank)] = numbers.tanh();
  });
  const at::Tensor expected = numbers.tanh();
  for (const at::Tensor& result : results) {
    if (!at::equal(result, expected)) return false;
  }
  return true;
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int count, char** arguments) {
  if (count > 1) return penstock::internal::testing::ranks_agree() ? 0 : 1;
  int wrong = 0;
  for (int i = 0; i < penstock::internal::testing::kProcesses; ++i) {
    const pid_t process = fork();
    if (process == 0) {
      execl("/proc/self/exe", arguments[0], "once", nullptr);
      std::_Exit(2);
    }
    int status = 0;
    if (process < 0 || waitpid(process, &status, 0) != process || !WIFEXITED(status) || WEXITSTATUS(status) > 1) {
      std::cout << "process " << i << " did not come to its end\n";
      return 2;
    }
    wrong += WEXITSTATUS(status);
  }
  std::cout << wrong << " of " << penstock::internal::testing::kProcesses
            << " processes had another result on one of their ranks\n";
  return wrong == 0 ? 0 : 1;
}
