// Program that lifetime_test.cc starts, as one process with thread ranks or as a process rank. It exits with 0 on
// success.
//
//   lifetime_program CARRIER exit         exits with a pipeline on the stack
//   lifetime_program CARRIER leak         returns from main with a pipeline that is never destroyed
//   lifetime_program CARRIER exit-in-step exits while another thread is in steps
//   lifetime_program CARRIER join-at-exit the same, with a static object that waits for that thread
//   lifetime_program CARRIER profile SEED begins and ends profiles at random moments
//
// The carrier is threads or gloo; or staged or direct for two replicas of process ranks with a simulated device each.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr int kRanks = 2;

class Trained {
 public:
  explicit Trained(const std::string& carrier, std::shared_ptr<Transport> transport = nullptr)
      : transport_(std::move(transport)) {
    if (carrier != "threads" && !transport_) {
      transport_ = c10d_transport(place(), carrier == "direct" ? options_of(DeviceCarrier::Direct) : C10dOptions());
    }
    if (carrier == "staged" || carrier == "direct") {
      model_ = perceptron(kRanks, [](int) { return sim_device(0); });
    }
    std::vector<int> own{0, 1};
    if (transport_) own = {transport_->rank() % kRanks};
    PipelineOptions options{.transport = transport_, .loss = squared_error};
    options.timeout = std::chrono::seconds(60);
    pipeline_ = std::make_unique<Pipeline>(model_.build(own), schedule_, options);
  }
  void step() { pipeline_->step({rows(8, "x")}, {}, rows(8, "y")); }

  static const Rendezvous& place() {
    static const auto* const kPlace = new Rendezvous(rendezvous());
    return *kPlace;
  }

 private:
  Schedule schedule_ = generate("1F1B", {.ranks = kRanks, .microbatches = 4});
  Model model_ = perceptron(kRanks);
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Pipeline> pipeline_;
};

// Joins its thread when static objects are destroyed.
struct Joined {
  ~Joined() {
    if (thread.joinable()) thread.join();
  }
  std::thread thread;
};

int exit_in_step(const std::string& carrier, bool joined) {
  static Joined at_exit;
  static Trained& trained = *new Trained(carrier);
  static std::atomic<int> steps = 0;
  std::thread thread([joined] {
    try {
      for (;;) {
        trained.step();
        steps = steps + 1;
        steps.notify_all();
      }
    } catch (const PipelineError&) {
      // The error is thrown only because the static object joins this thread.
      if (!joined) std::abort();
    }
  });
  while (steps < 3) steps.wait(steps);
  if (joined) {
    at_exit.thread = std::move(thread);
  } else {
    thread.detach();
  }
  std::exit(0);  // NOLINT(concurrency-mt-unsafe): it is what is tested
}

// Constructs, uses and destroys pipelines, in the same order in all processes, while each process starts and stops
// profilers at random times of its own.
int profile(const std::string& carrier, unsigned seed) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const char* rank = std::getenv("RANK");
  std::mt19937 same(seed);
  std::mt19937 own(seed * 1000 + static_cast<unsigned>(rank == nullptr ? 0 : std::atoi(rank)));
  const auto chance = [](std::mt19937& random, int of) { return std::uniform_int_distribution(1, of)(random) == 1; };
  std::optional<Trained> trained;
  bool profiling = false;
  std::size_t events = 0;
  const auto turn_profiler = [&](bool on) {
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    if (on) {
      profiler::prepareProfiler(config, {ActivityType::CPU});
      profiler::enableProfiler(config, {ActivityType::CPU});
    } else {
      events += profiler::disableProfiler()->events().size();
    }
    profiling = on;
  };
  for (int i = 0; i < 60; ++i) {
    if (chance(own, 3)) turn_profiler(!profiling);
    // A step lies between construction and destruction: a rank that disconnects before the other has connected counts
    // as lost.
    if (trained && chance(same, 4)) {
      trained.reset();
      continue;
    }
    if (!trained) {
      trained.emplace(carrier);
      if (chance(own, 3)) turn_profiler(!profiling);
    }
    trained->step();
  }
  if (profiling) turn_profiler(false);
  trained.reset();
  return events > 0 ? 0 : 4;
}

int main(const std::vector<std::string>& words) {
  const std::string& carrier = words.at(0);
  const std::string& what = words.at(1);
  if (carrier == "staged" || carrier == "direct") sim::install({.devices = 1});
  if (what == "profile") return profile(carrier, static_cast<unsigned>(std::stoul(words.at(2))));
  if (what == "exit-in-step" || what == "join-at-exit") return exit_in_step(carrier, what == "join-at-exit");
  if (what == "leak") {
    auto* const leaked = new Trained(carrier);
    for (int i = 0; i < 3; ++i) leaked->step();
    return 0;
  }
  Trained trained(carrier);
  for (int i = 0; i < 3; ++i) trained.step();
  std::exit(0);  // NOLINT(concurrency-mt-unsafe): it is what is tested
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  try {
    return penstock::internal::testing::main(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 3;
  }
}
