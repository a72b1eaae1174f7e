// Runs a program in a Pipeline and compares it with the reference run in one process.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
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
#include "tests/device/test_devices.h"
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

// Result of a step in CPU memory: outputs, losses by microbatch, and gradients and buffers by stage and name.
struct Outcome {
  TensorsByName outputs = {};
  std::vector<at::Tensor> losses = {};
  std::map<std::pair<int, std::string>, at::Tensor> gradients = {};
  std::map<std::string, at::Tensor> buffers = {};
  // Parameters by name, to which some programs write.
  std::map<std::string, at::Tensor> parameters = {};
};

// The device is that of the first stage, as random numbers and recurrent layers of a device are not those of the CPU.
inline Outcome run_in_one_process(const Pipe& pipe, const Schedule& schedule, const TensorsByName& inputs,
                                  std::uint64_t seed, at::Device device = test_device(0)) {
  const std::vector<Arguments> microbatches = split_arguments(pipe.program(), inputs, schedule.microbatches());
  const ReferenceRun run = run_reference(pipe, schedule, microbatches, {.seed = seed, .device = device});
  bool has_buffers = true;
  if (!device.is_cpu()) {
    // A run on a device leaves the buffers of the program alone. Those of the CPU are the same unless they depend on
    // random numbers.
    const ReferenceRun on_cpu = run_reference(pipe, schedule, microbatches, {.seed = seed});
    for (std::size_t i = 0; i < run.losses.size(); ++i) {
      has_buffers = has_buffers && same_bits(run.losses[i], on_cpu.losses[i]);
    }
  }
  Outcome outcome{.outputs = outputs_by_name(run.outputs), .losses = run.losses};
  for (int stage = 0; stage < pipe.num_stages(); ++stage) {
    for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
      const auto gradient = run.gradients.find(name);
      if (gradient != run.gradients.end()) outcome.gradients.emplace(std::pair(stage, name), gradient->second);
    }
  }
  for (const auto& [name, buffer] : pipe.program().buffers()) {
    if (has_buffers) outcome.buffers.emplace(name, buffer);
  }
  for (const auto& [name, parameter] : pipe.program().parameters()) outcome.parameters.emplace(name, parameter);
  return outcome;
}

inline Outcome run_in_one_process(const Pipe& pipe, const Schedule& schedule, std::uint64_t seed = 0) {
  return run_in_one_process(pipe, schedule, inputs_of(pipe.program()), seed);
}

// Returns an output without its graph.
inline c10::IValue on_host(const c10::IValue& output) {
  return map_leaves(flatten_args_detach(output).value, [](const c10::IValue& leaf) {
    return leaf.isTensor() && leaf.toTensor().defined() ? c10::IValue(leaf.toTensor().cpu()) : leaf;
  });
}

// Sharded parameters are those of this rank.
inline void add_results_of_stages(const Pipeline& pipeline, Outcome& outcome) {
  for (const PipelineStage& stage : pipeline.stages()) {
    for (const auto& [name, parameter] : stage.parameters()) {
      outcome.parameters.emplace(name, parameter.detach().cpu());
      if (!parameter.grad().defined()) continue;
      outcome.gradients.emplace(std::pair(stage.stage_index(), name), parameter.grad().cpu());
    }
    for (const auto& [name, buffer] : stage.module().buffers) outcome.buffers.emplace(name, buffer.cpu());
  }
}

inline Outcome run_in_stages(const Pipe& pipe, const Schedule& schedule, const TensorsByName& inputs,
                             std::uint64_t seed) {
  std::vector<c10::IValue> outputs(static_cast<std::size_t>(schedule.microbatches()));
  std::mutex mutex;
  PipelineOptions options = step_options(seed);
  // The target of a microbatch is its index.
  options.loss = [&](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    const std::scoped_lock lock(mutex);
    outputs[static_cast<std::size_t>(target.toTensor().item<std::int64_t>())] = on_host(output);
    return sum_of_means(output);
  };
  Pipeline pipeline(pipe.build(test_device), schedule, options);
  const Arguments batch = arguments_from(pipe.program(), inputs);
  StepOptions step;
  step.return_outputs = false;
  const at::Tensor numbers = at::arange(schedule.microbatches(), at::kLong);
  Outcome outcome;
  for (const at::Tensor& loss : pipeline.step(batch.args, batch.kwargs, numbers, step).losses) {
    outcome.losses.push_back(loss.cpu());
  }
  outcome.outputs = outputs_by_name(outputs);
  add_results_of_stages(pipeline, outcome);
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
  if (expected.buffers.empty()) return;
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
