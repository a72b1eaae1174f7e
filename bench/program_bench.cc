// Times exported programs. Reads requests from standard input, one per line, and answers each with a line;
// bench/program.py sends them.
//
//   one MODEL.pt2 THREADS STEPS                          seconds for a forward and backward of a microbatch
//   pipeline MODEL.pt2 SCHEDULE STAGES MICROBATCHES STEPS  seconds for a step on two thread ranks
#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/answering.h"
#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/costs.h"
#include "penstock/schedule/generators.h"

namespace penstock::internal::bench {
namespace {

constexpr std::int64_t kBytes = 256;
constexpr int kLayers = 4;

at::Tensor cross_entropy(const c10::IValue& output, const c10::IValue& target, const Kwargs& /*unused*/) {
  return at::cross_entropy_loss(output.toTensor().flatten(0, 1), target.toTensor().flatten());
}

// Returns the median, without the first two.
template <class Act>
double median_seconds(int steps, const Act& act) {
  std::vector<double> times;
  for (int i = 0; i < steps + 2; ++i) times.push_back(act());
  times.erase(times.begin(), times.begin() + 2);
  return median(std::move(times));
}

double time_one(const std::string& model, int threads, int steps) {
  at::set_num_threads(threads);
  const Program program(model);
  const Arguments batch = arguments_from(program, example_inputs(program, 1, /*seed=*/0));
  const at::Tensor target = at::randint(kBytes, batch.args[0].toTensor().sizes(), at::kLong);
  const double time = median_seconds(steps, [&] {
    for (const auto& [name, parameter] : program.parameters()) parameter.mutable_grad().reset();
    return bench::seconds([&] { cross_entropy(program.run(batch.args), target, {}).backward(); });
  });
  at::set_num_threads(1);
  return time;
}

double time_pipeline(const std::string& model, const std::string& name, int stages, int microbatches, int steps) {
  SplitSpec cuts;
  for (int i = 1; i < stages; ++i) {
    cuts.emplace_back("blocks." + std::to_string(kLayers * i / stages), SplitPoint::BEGINNING);
  }
  const Pipe pipe = pipeline(Program(model), cuts);
  const Schedule schedule = generate(name, {.ranks = 2, .stages_per_rank = stages / 2, .microbatches = microbatches});
  Pipeline run(pipe.build(), schedule, {.loss = cross_entropy});
  const Arguments batch = arguments_from(pipe.program(), example_inputs(pipe.program(), microbatches, /*seed=*/0));
  const at::Tensor target = at::randint(kBytes, batch.args[0].toTensor().sizes(), at::kLong);
  return median_seconds(steps, [&] {
    for (const PipelineStage& stage : run.stages()) {
      for (const auto& [label, parameter] : stage.parameters()) parameter.mutable_grad().reset();
    }
    return bench::seconds([&] { run.step(batch.args, {}, target, {.return_outputs = false}); });
  });
}

int answer_questions() {
  std::string what;
  std::string model;
  while (std::cin >> what >> model) {
    int steps = 0;
    if (what == "one") {
      int threads = 0;
      std::cin >> threads >> steps;
      std::cout << time_one(model, threads, steps) << std::endl;
    } else if (what == "pipeline") {
      std::string schedule;
      int stages = 0;
      int microbatches = 0;
      std::cin >> schedule >> stages >> microbatches >> steps;
      std::cout << time_pipeline(model, schedule, stages, microbatches, steps) << std::endl;
    } else {
      std::cerr << "'" << what << "' is none of one and pipeline\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace penstock::internal::bench

int main() {
  return penstock::internal::bench::run(penstock::internal::bench::answer_questions);
}
