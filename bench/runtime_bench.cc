// Our side of bench/runtime.py: thread ranks on tiny stages, whose time is all overhead.
//
//   overhead SCHEDULE RANKS MICROBATCHES STEPS   seconds for a step, the median of STEPS: linear layers of 16, rows of one
//   bare MICROBATCHES WIDE ROWS STEPS            the same forwards and backwards on one thread in a bare loop
//   one MICROBATCHES WIDE ROWS STEPS             and by an executor of one rank
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/answering.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"

namespace penstock {
namespace {

using bench::seconds;

at::Tensor squared_error(const c10::IValue& output, const c10::IValue& target, const Kwargs& /*kwargs*/) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

StageModule linear(std::int64_t wide) {
  const at::Tensor weight = at::randn({wide, wide}).div_(static_cast<double>(wide)).requires_grad_();
  const at::Tensor bias = at::zeros({wide}).requires_grad_();
  return {.forward = [=](const Args& args, const Kwargs& /*kwargs*/) -> c10::IValue {
            return at::linear(args[0].toTensor(), weight, bias);
          },
          .parameters = {{"weight", weight}, {"bias", bias}}};
}

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times.at(times.size() / 2);
}

double time_steps(const Schedule& schedule, std::int64_t wide, std::int64_t rows, int steps) {
  std::vector<PipelineStage> stages;
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < schedule.stages(); ++i) {
    stages.emplace_back(linear(wide), i, schedule.stages());
    for (const auto& [name, parameter] : stages.back().parameters()) parameters.push_back(parameter);
  }
  Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
  const at::Tensor x = at::randn({rows * schedule.microbatches(), wide});
  const at::Tensor y = at::randn({rows * schedule.microbatches(), wide});
  std::vector<double> times;
  for (int i = 0; i < steps + 2; ++i) {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    times.push_back(seconds([&] { pipeline.step({x}, {}, y, {.return_outputs = false}); }));
  }
  return median({times.begin() + 2, times.end()});
}

double time_bare(int microbatches, std::int64_t wide, std::int64_t rows, int steps) {
  const StageModule module = linear(wide);
  const at::Tensor x = at::randn({rows * microbatches, wide});
  const at::Tensor y = at::randn({rows * microbatches, wide});
  const at::Tensor seed = at::scalar_tensor(1.0 / microbatches);
  std::vector<double> times;
  for (int i = 0; i < steps + 2; ++i) {
    for (const auto& [name, parameter] : module.parameters) parameter.mutable_grad().reset();
    times.push_back(seconds([&] {
      for (int mb = 0; mb < microbatches; ++mb) {
        const c10::IValue output = module.forward({x.narrow(0, mb * rows, rows)}, {});
        squared_error(output, y.narrow(0, mb * rows, rows), {}).backward(seed);
      }
    }));
  }
  return median({times.begin() + 2, times.end()});
}

int answer_questions() {
  at::set_num_threads(1);
  std::string what;
  while (std::cin >> what) {
    int microbatches = 0;
    int steps = 0;
    if (what == "overhead") {
      std::string schedule;
      int ranks = 0;
      std::cin >> schedule >> ranks >> microbatches >> steps;
      std::cout << time_steps(generate(schedule, {.ranks = ranks, .microbatches = microbatches}), 16, 1, steps)
                << std::endl;
    } else if (what == "bare" || what == "one") {
      std::int64_t wide = 0;
      std::int64_t rows = 0;
      std::cin >> microbatches >> wide >> rows >> steps;
      std::cout << (what == "bare"
                        ? time_bare(microbatches, wide, rows, steps)
                        : time_steps(generate("1F1B", {.ranks = 1, .microbatches = microbatches}), wide, rows, steps))
                << std::endl;
    } else {
      std::cerr << "'" << what << "' is none of overhead, bare and one\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace penstock

int main() {
  return penstock::bench::run(penstock::answer_questions);
}
