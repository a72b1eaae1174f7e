// Recomputation of exported programs: by modules, and by stages.
#include "penstock/stage/recomputation.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/program/cuts.h"
#include "tests/program/piped.h"
#include "tests/program/programs.h"
#include "tests/stage/recomputed_part.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

at::Tensor tensor_of(const Pipe& pipe, const std::string& name) {
  return by_name(pipe.program().parameters()).at(name);
}

TEST(RecomputedProgram, WritesIntoAParameterOnce) {
  for (const std::string name : {"written_parameter", "written_factor"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = in_a_row("GPipe", 1);
    const Pipe plain_pipe = pipeline(exported(name), 1);
    const Outcome expected = run_in_one_process(plain_pipe, schedule);
    EXPECT_TRUE(at::allclose(tensor_of(plain_pipe, "fading"), at::full({4}, 0.9 * 0.9 * 0.9 * 0.9)));
    const auto expect_the_same = [&](const std::vector<std::string>& modules, const Schedule& made) {
      const Pipe pipe = pipeline(exported(name), 1);
      Program program = pipe.program();
      program.recompute(modules);
      expect_same(expected, run_in_stages(pipe, made, inputs_of(pipe.program()), /*seed=*/0));
      EXPECT_TRUE(at::equal(tensor_of(plain_pipe, "fading"), tensor_of(pipe, "fading")));
    };
    expect_the_same({}, schedule);
    expect_the_same({}, add_recomputation(schedule));
    expect_the_same({"first"}, schedule);
  }
}

TEST(RecomputedProgram, RestoresAWrittenParameterAfterAFailure) {
  const Pipe pipe = pipeline(exported("written_parameter"), 1);
  PipelineOptions options = step_options();
  int losses = 0;
  options.loss = [&](const c10::IValue& output, const c10::IValue&, const Kwargs&) {
    if (++losses == 2) throw std::runtime_error("the loss is lost");
    return sum_of_means(output);
  };
  Pipeline in_stages(pipe.build(), in_a_row("GPipe", 1), options);
  const Arguments batch = batch_of(pipe.program());
  EXPECT_THROW(in_stages.step(batch.args, batch.kwargs, at::Tensor()), std::exception);
  EXPECT_TRUE(at::equal(tensor_of(pipe, "fading"), at::ones({4})));
}

TEST(RecomputedProgram, RefusesToShardAWrittenParameter) {
  const auto replicas = [] {
    std::vector<StagedModel> made;
    for (int i = 0; i < 2; ++i) made.push_back(pipeline(exported("written_parameter"), 1).build());
    return made;
  };
  PipelineOptions options = step_options();
  options.sharded = true;
  EXPECT_EQ(
      message_of([&] { Pipeline(replicas(), in_a_row("GPipe", 1), options); }),
      "stage 0, parameter 'fading' is written to by the stage's forward, and cannot be sharded: each replica would "
      "lose what it has written.\n  Hint: make it a buffer.");
}

TEST(RepeatedModules, AreBlocksOfMoreThanOneOperator) {
  EXPECT_EQ(exported("blocks").repeated_modules(), (Words{"blocks.0", "blocks.1", "blocks.2", "blocks.3"}));
  // A list of linear layers.
  EXPECT_EQ(from_zoo("mlp").repeated_modules(), Words());
}

}  // namespace
}  // namespace penstock::internal::testing
