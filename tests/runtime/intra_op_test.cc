// Numbers of intra-op threads: those of rank threads do not change those of the program.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/intra_op_threads.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

// Returns the number of intra-op threads on a new thread of the program.
int threads_of_a_new_thread() {
  int found = 0;
  std::thread([&found] { found = at::get_num_threads(); }).join();
  return found;
}

TEST(IntraOpThreads, AreThoseOfOneThread) {
  const int others = threads_of_a_new_thread();
  const int own = at::get_num_threads();
  {
    const IntraOpThreads threads(own + 2);
    EXPECT_EQ(at::get_num_threads(), own + 2);
    EXPECT_EQ(threads_of_a_new_thread(), others);
    {
      const IntraOpThreads fewer(1);
      EXPECT_EQ(at::get_num_threads(), 1);
    }
    EXPECT_EQ(at::get_num_threads(), own + 2);
  }
  EXPECT_EQ(at::get_num_threads(), own);
  EXPECT_EQ(threads_of_a_new_thread(), others);
}

TEST(IntraOpThreads, OfAPipelineAreNotThoseOfTheProgram) {
  const int others = threads_of_a_new_thread();
  const int own = at::get_num_threads();
  for (const int count : {1, 3}) {
    Model model = perceptron(2);
    std::atomic<int> of_ranks = 0;
    std::atomic<int> of_program = 0;
    for (StageModule& stage : model.stages) {
      stage.forward = [&, before = stage.forward](const Args& args, const Kwargs& kwargs) {
        of_ranks = at::get_num_threads();
        of_program = threads_of_a_new_thread();
        return before(args, kwargs);
      };
    }
    PipelineOptions options{.loss = squared_error};
    options.intra_op_threads = count;
    Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 2}), options);
    EXPECT_EQ(threads_of_a_new_thread(), others);
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    EXPECT_EQ(of_ranks, count);
    EXPECT_EQ(of_program, others);
    EXPECT_EQ(threads_of_a_new_thread(), others);
    EXPECT_EQ(at::get_num_threads(), own);
  }
}

}  // namespace
}  // namespace penstock::internal::testing
