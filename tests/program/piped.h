// Runs a program in a Pipeline and compares it with the reference run in one process.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/inputs.h"
#include "penstock/program/interpreter/reference_run.h"
#include "penstock/program/pipe.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/nested.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

// Reads a program and splits it.
using MakePipe = std::function<Pipe()>;

constexpr int kMicrobatches = 4;

// Inputs of all microbatches, concatenated.
inline TensorsByName inputs_of(const Program& program) {
  return example_inputs(program, kMicrobatches, /*seed=*/7);
}
inline Arguments batch_of(const Program& program) {
  return arguments_from(program, inputs_of(program));
}

inline std::vector<Arguments> microbatches_of(const Program& program) {
  return split_arguments(program, inputs_of(program), kMicrobatches);
}

inline PipelineOptions step_options(std::uint64_t seed = 0) {
  PipelineOptions options;
  options.loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) { return sum_of_means(output); };
  options.timeout = std::chrono::seconds(60);
  options.seed = seed;
  return options;
}

// Result of a step: outputs, losses by microbatch, and gradients and buffers by stage and name.
struct Outcome {
  TensorsByName outputs = {};
  std::vector<at::Tensor> losses = {};
  std::map<std::pair<int, std::string>, at::Tensor> gradients = {};
  std::map<std::string, at::Tensor> buffers = {};
};

inline Outcome run_in_one_process(const Pipe& pipe, const Schedule& schedule, const TensorsByName& inputs,
                                  std::uint64_t seed) {
  const ReferenceRun run =
      run_reference(pipe, schedule, split_arguments(pipe.program(), inputs, schedule.microbatches()), {.seed = seed});
  Outcome outcome{.outputs = outputs_by_name(run.outputs), .losses = run.losses};
  for (int stage = 0; stage < pipe.num_stages(); ++stage) {
    for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
      const auto gradient = run.gradients.find(name);
      if (gradient != run.gradients.end()) outcome.gradients.emplace(std::pair(stage, name), gradient->second);
    }
  }
  for (const auto& [name, buffer] : pipe.program().buffers()) outcome.buffers.emplace(name, buffer);
  return outcome;
}

inline Outcome run_in_one_process(const Pipe& pipe, const Schedule& schedule, std::uint64_t seed = 0) {
  return run_in_one_process(pipe, schedule, inputs_of(pipe.program()), seed);
}

inline Outcome run_in_stages(const Pipe& pipe, const Schedule& schedule, const TensorsByName& inputs,
                             std::uint64_t seed) {
  std::vector<c10::IValue> outputs(static_cast<std::size_t>(schedule.microbatches()));
  std::mutex mutex;
  PipelineOptions options = step_options(seed);
  // The target of a microbatch is its index.
  options.loss = [&](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    const std::scoped_lock lock(mutex);
    outputs[static_cast<std::size_t>(target.toTensor().item<std::int64_t>())] = flatten_args_detach(output).value;
    return sum_of_means(output);
  };
  Pipeline pipeline(pipe.build(), schedule, options);
  const Arguments batch = arguments_from(pipe.program(), inputs);
  StepOptions step;
  step.return_outputs = false;
  const at::Tensor numbers = at::arange(schedule.microbatches(), at::kLong);
  Outcome outcome{.losses = pipeline.step(batch.args, batch.kwargs, numbers, step).losses};
  outcome.outputs = outputs_by_name(outputs);
  for (int stage = 0; stage < pipe.num_stages(); ++stage) {
    for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
      if (parameter.grad().defined()) outcome.gradients.emplace(std::pair(stage, name), parameter.grad());
    }
    for (const auto& [name, buffer] : pipe.get_stage_module(stage).buffers) outcome.buffers.emplace(name, buffer);
  }
  return outcome;
}

inline Outcome run_in_stages(const Pipe& pipe, const Schedule& schedule, std::uint64_t seed = 0) {
  return run_in_stages(pipe, schedule, inputs_of(pipe.program()), seed);
}

// Expects bitwise identical results; gradients of shared parameters may differ by 1e-6 of the largest.
inline void expect_same(const Outcome& expected, const Outcome& found, const SharedParameters& shared = {}) {
  ASSERT_EQ(expected.outputs.size(), found.outputs.size());
  for (const auto& [name, output] : expected.outputs) {
    EXPECT_TRUE(at::equal(output, found.outputs.at(name))) << name;
  }
  ASSERT_EQ(expected.losses.size(), found.losses.size());
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_TRUE(same(expected.losses[i], found.losses[i])) << "the loss of microbatch " << i;
  }
  ASSERT_EQ(expected.gradients.size(), found.gradients.size());
  for (const auto& [place, gradient] : expected.gradients) {
    const std::string name = place.second + " of stage " + std::to_string(place.first);
    const auto other = found.gradients.find(place);
    ASSERT_NE(other, found.gradients.end()) << name;
    bool is_shared = false;
    for (const auto& places : shared) is_shared = is_shared || places.front().name == place.second;
    if (is_shared) {
      const auto largest = gradient.abs().max().item<double>();
      EXPECT_LE((gradient - other->second).abs().max().item<double>(), 1e-6 * largest) << name;
    } else {
      EXPECT_TRUE(same_bits(gradient, other->second))
          << name << "\nexpected: " << text(gradient) << "\nfound:    " << text(other->second);
    }
  }
  for (const auto& [name, buffer] : found.buffers) EXPECT_TRUE(same(expected.buffers.at(name), buffer)) << name;
}

// Expects that a step in stages gives the result of one process.
inline void expect_what_one_process_gives(const MakePipe& make, const Schedule& schedule, const TensorsByName& inputs,
                                          std::uint64_t seed = 0) {
  const Outcome expected = run_in_one_process(make(), schedule, inputs, seed);
  const Pipe pipe = make();
  ASSERT_EQ(pipe.num_stages(), schedule.stages());
  expect_same(expected, run_in_stages(pipe, schedule, inputs, seed), pipe.shared_parameters());
}
inline void expect_what_one_process_gives(const MakePipe& make, const Schedule& schedule, std::uint64_t seed = 0) {
  expect_what_one_process_gives(make, schedule, inputs_of(make().program()), seed);
}

inline Schedule in_a_row(const std::string& name, int ranks, int stages_per_rank = 1) {
  return generate(name, {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = kMicrobatches});
}

}  // namespace penstock::internal::testing
