// Penstock's side of bench/runtime.py: thread ranks, and process ranks where it says so.
//
//   overhead SCHEDULE MICROBATCHES STEPS   seconds for a step, the median of STEPS, on two ranks with linear layers of
//                                          16 and rows of one, whose time is all overhead
//   processes SCHEDULE MICROBATCHES STEPS  the same on two processes that talk through Gloo
//   bare MICROBATCHES WIDE ROWS STEPS      the same for linear layers on one thread, in a bare loop
//   one MICROBATCHES WIDE ROWS STEPS       and by an executor of one rank
//   transformer MICROBATCHES STEPS         seconds for a step of 1F1B on two ranks, and its makespan by the simulator,
//                                          with the costs of its actions, divided by the measured one
//   accumulate WIDE STEPS                  seconds for a step of 1F1B with 4 microbatches of one row on two ranks with
//                                          linear layers, which adds to the gradients of earlier steps, and its peak
//                                          memory in bytes beyond the memory that is allocated between steps
//   cleared WIDE STEPS                     the same for steps that begin without gradients
//   memory MICROBATCHES                    bytes of memory that two ranks of 1F1B had at most, without the batch: to be
//                                          asked of a process that was asked nothing before
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/answering.h"
#include "bench/transformer.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/processes.h"

namespace penstock::internal::bench {
namespace {

using bench::seconds;

// Width of stages whose time is all overhead.
constexpr std::int64_t kTinyWide = 16;
// Rows of a microbatch.
constexpr std::int64_t kTextRows = 2;
constexpr std::int64_t kMemoryRows = 1024;
// With this width a boundary tensor has 256 KiB.
constexpr std::int64_t kMemoryWide = 64;
constexpr int kMemorySteps = 3;
// One row, so that gradients are large compared with the computation.
constexpr std::int64_t kAccumulateRows = 1;
constexpr int kAccumulateMicrobatches = 4;

at::Tensor squared_error(const c10::IValue& output, const c10::IValue& target, const Kwargs& /*kwargs*/) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

at::Tensor cross_entropy(const c10::IValue& output, const c10::IValue& target, const Kwargs& /*kwargs*/) {
  return at::cross_entropy_loss(output.toTensor().flatten(0, 1), target.toTensor().flatten());
}

StageModule linear(std::int64_t wide) {
  const at::Tensor weight = at::randn({wide, wide}).div_(static_cast<double>(wide)).requires_grad_();
  const at::Tensor bias = at::zeros({wide}).requires_grad_();
  return {.forward = [=](const Args& args, const Kwargs& /*kwargs*/) -> c10::IValue {
            return at::linear(args[0].toTensor(), weight, bias);
          },
          .parameters = {{"weight", weight}, {"bias", bias}}};
}

// Makes a pipeline of all stages, or with a transport of those of this process.
Pipeline linear_pipeline(const Schedule& schedule, std::int64_t wide, std::shared_ptr<Transport> transport = nullptr) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < schedule.stages(); ++i) {
    const bool is_here = transport == nullptr || schedule.placement().rank_of(i) == transport->rank();
    if (is_here) stages.emplace_back(linear(wide), i, schedule.stages());
  }
  return {std::move(stages), schedule, {.transport = std::move(transport), .loss = squared_error}};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

// Returns the median time of `steps` steps after two warm-up steps. Each begins without gradients.
double time_steps(
    const std::vector<NamedTensors>& parameters, int steps, const std::function<void()>& step,
    const std::function<void()>& look = [] {}) {
  std::vector<double> times;
  for (int i = -2; i < steps; ++i) {
    for (const auto& of_stage : parameters) {
      for (const auto& [name, parameter] : of_stage) parameter.mutable_grad().reset();
    }
    const double time = seconds(step);
    if (i < 0) continue;
    times.push_back(time);
    look();
  }
  return median(std::move(times));
}

std::vector<NamedTensors> parameters_of(const Pipeline& pipeline) {
  std::vector<NamedTensors> parameters;
  for (const PipelineStage& stage : pipeline.stages()) parameters.push_back(stage.parameters());
  return parameters;
}

double time_pipeline(const Schedule& schedule, std::int64_t wide, std::int64_t rows, int steps) {
  Pipeline pipeline = linear_pipeline(schedule, wide);
  const at::Tensor x = at::randn({rows * schedule.microbatches(), wide});
  const at::Tensor y = at::randn({rows * schedule.microbatches(), wide});
  return time_steps(parameters_of(pipeline), steps, [&] { pipeline.step({x}, {}, y, {.return_outputs = false}); });
}

// Runs in a process that is one of two ranks. Both ranks pass a barrier before and after each step.
double time_process(const Schedule& schedule, int steps) {
  const std::shared_ptr<Transport> transport = c10d_transport(rendezvous());
  Pipeline pipeline = linear_pipeline(schedule, kTinyWide, transport);
  const at::Tensor x = at::randn({schedule.microbatches(), kTinyWide});
  const at::Tensor y = at::randn({schedule.microbatches(), kTinyWide});
  const std::shared_ptr<Group> both = transport->group({0, 1});
  const auto meet = [&] { both->barrier()->wait(Clock::now() + std::chrono::minutes(1)); };
  std::vector<double> times;
  for (int i = -2; i < steps; ++i) {
    for (const auto& of_stage : parameters_of(pipeline)) {
      for (const auto& [name, parameter] : of_stage) parameter.mutable_grad().reset();
    }
    meet();
    const double time = seconds([&] {
      pipeline.step({x}, {}, y, {.return_outputs = false});
      meet();
    });
    if (i >= 0) times.push_back(time);
  }
  return median(std::move(times));
}

// Starts both ranks as processes of this program. The first one prints the answer.
void answer_by_processes(const std::string& schedule, int microbatches, int steps) {
  ProcessRanks ranks({.program = "/proc/self/exe",
                      .arguments = {schedule, std::to_string(microbatches), std::to_string(steps)},
                      .ranks = 2,
                      .environment = {}});
  for (const ProcessEnd& end : ranks.wait(Clock::now() + std::chrono::minutes(5))) {
    if (!end.succeeded()) throw std::runtime_error("a rank " + to_string(end));
  }
}

// Runs on a thread of its own, as a rank does, because malloc treats the main thread differently.
double time_bare(int microbatches, std::int64_t wide, std::int64_t rows, int steps) {
  const StageModule module = linear(wide);
  const at::Tensor x = at::randn({rows * microbatches, wide});
  const at::Tensor y = at::randn({rows * microbatches, wide});
  const at::Tensor seed = at::scalar_tensor(1.0 / microbatches);
  const auto step = [&] {
    std::vector<at::Tensor> losses;
    for (int mb = 0; mb < microbatches; ++mb) {
      const c10::IValue output = module.forward({x.narrow(0, mb * rows, rows)}, {});
      const at::Tensor loss = squared_error(output, y.narrow(0, mb * rows, rows), {});
      loss.backward(seed);
      losses.push_back(loss.detach());
    }
  };
  return std::async(std::launch::async,
                    [&] {
                      at::set_num_threads(1);
                      return time_steps({module.parameters}, steps, step);
                    })
      .get();
}

struct Transformed {
  double seconds = 0;
  double simulated = 0;
};

Transformed time_transformer(int microbatches, int steps) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < 2; ++i) stages.emplace_back(bench::half_a_transformer(/*first=*/i == 0), i, 2);
  Pipeline pipeline(std::move(stages), generate("1F1B", {.ranks = 2, .microbatches = microbatches}),
                    {.loss = cross_entropy});
  const at::Tensor text = at::randint(bench::kBytes, {kTextRows * microbatches, bench::kLength + 1});
  const at::Tensor ids = text.narrow(1, 0, bench::kLength);
  const at::Tensor next_ids = text.narrow(1, 1, bench::kLength);
  std::vector<double> simulated;
  const double time = time_steps(
      parameters_of(pipeline), steps, [&] { pipeline.step({ids}, {}, next_ids, {.return_outputs = false}); },
      [&] {
        const Schedule& schedule = pipeline.recorded_schedule();
        simulated.push_back(simulate(schedule, costs_of(schedule, pipeline.record())).makespan /
                            timeline_of(schedule, pipeline.record()).makespan);
      });
  return {.seconds = time, .simulated = median(std::move(simulated))};
}

// Returns the peak resident memory of this process since forget_peak().
std::int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  throw std::runtime_error("/proc/self/status does not say VmHWM");
}

void forget_peak() {
  std::ofstream file("/proc/self/clear_refs");
  if (!(file << 5 << std::flush)) throw std::runtime_error("/proc/self/clear_refs cannot be written to");
}

std::int64_t memory_of_steps(int microbatches) {
  Pipeline pipeline = linear_pipeline(generate("1F1B", {.ranks = 2, .microbatches = microbatches}), kMemoryWide);
  const at::Tensor x = at::randn({kMemoryRows * microbatches, kMemoryWide});
  const at::Tensor y = at::randn({kMemoryRows * microbatches, kMemoryWide});
  forget_peak();
  for (int i = 0; i < kMemorySteps; ++i) pipeline.step({x}, {}, y, {.return_outputs = false});
  return peak_bytes() - static_cast<std::int64_t>(x.nbytes() + y.nbytes());
}

struct Accumulated {
  double seconds = 0;
  std::int64_t peak = 0;
};

Accumulated time_accumulation(std::int64_t wide, int steps, bool clear) {
  Pipeline pipeline = linear_pipeline(generate("1F1B", {.ranks = 2, .microbatches = kAccumulateMicrobatches}), wide);
  const at::Tensor x = at::randn({kAccumulateRows * kAccumulateMicrobatches, wide});
  const at::Tensor y = at::randn({kAccumulateRows * kAccumulateMicrobatches, wide});
  std::vector<double> times;
  std::int64_t peak = 0;
  for (int i = -2; i < steps; ++i) {
    for (const auto& of_stage : parameters_of(pipeline)) {
      for (const auto& [name, parameter] : of_stage) {
        if (clear) parameter.mutable_grad().reset();
      }
    }
    forget_peak();
    const std::int64_t between_steps = peak_bytes();
    const double time = seconds([&] { pipeline.step({x}, {}, y, {.return_outputs = false}); });
    if (i < 0) continue;
    times.push_back(time);
    peak = std::max(peak, peak_bytes() - between_steps);
  }
  return {.seconds = median(std::move(times)), .peak = peak};
}

int answer_questions() {
  at::set_num_threads(1);
  std::string what;
  while (std::cin >> what) {
    std::string schedule = "1F1B";
    if (what == "overhead" || what == "processes") std::cin >> schedule;
    int microbatches = 0;
    std::int64_t wide = kTinyWide;
    std::int64_t rows = 1;
    int steps = 0;
    if (what == "accumulate" || what == "cleared") {
      std::cin >> wide >> steps;
      const Accumulated answer = time_accumulation(wide, steps, /*clear=*/what == "cleared");
      std::cout << answer.seconds << " " << answer.peak << std::endl;
      continue;
    }
    std::cin >> microbatches;
    if (what == "bare" || what == "one") std::cin >> wide >> rows;
    if (what != "memory") std::cin >> steps;
    const int ranks = what == "one" ? 1 : 2;
    if (what == "processes") {
      answer_by_processes(schedule, microbatches, steps);
      continue;
    }
    if (what == "overhead" || what == "one") {
      std::cout << time_pipeline(generate(schedule, {.ranks = ranks, .microbatches = microbatches}), wide, rows, steps);
    } else if (what == "bare") {
      std::cout << time_bare(microbatches, wide, rows, steps);
    } else if (what == "transformer") {
      const Transformed answer = time_transformer(microbatches, steps);
      std::cout << answer.seconds << " " << answer.simulated;
    } else if (what == "memory") {
      std::cout << memory_of_steps(microbatches);
    } else {
      std::cerr << "'" << what
                << "' is none of overhead, processes, bare, one, transformer, accumulate, cleared and memory\n";
      return 2;
    }
    std::cout << std::endl;
  }
  return 0;
}

int be_a_rank(const std::vector<std::string>& words) {
  at::set_num_threads(1);
  const GenerateOptions options{.ranks = 2, .microbatches = std::stoi(words.at(1))};
  const double time = time_process(generate(words.at(0), options), std::stoi(words.at(2)));
  if (read_environment().rank == 0) std::cout << time << std::endl;
  return 0;
}

}  // namespace
}  // namespace penstock::internal::bench

int main(int argc, char** argv) {
  if (argc == 1) return penstock::internal::bench::run(penstock::internal::bench::answer_questions);
  const std::vector<std::string> words(argv + 1, argv + argc);
  return penstock::internal::bench::run([&] { return penstock::internal::bench::be_a_rank(words); });
}
