// Pipelines of process ranks on the simulated accelerator, here on threads of one process: the same numbers as on the
// CPU, no races between streams, and no host waits, whichever way device tensors take between the ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

using Transports = std::vector<std::shared_ptr<Transport>>;

Transports connected(int ranks, const C10dOptions& options) {
  Transports transports(static_cast<std::size_t>(ranks));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(ranks, [&](int rank) {
    transports[static_cast<std::size_t>(rank)] = c10d_transport(store, rank, ranks, options);
  });
  return transports;
}

// Calls act(transport) for each rank on a thread of its own.
void run(const Transports& transports, const std::function<void(const std::shared_ptr<Transport>&)>& act) {
  on_threads(static_cast<int>(transports.size()), [&](int rank) {
    const auto& transport = transports[static_cast<std::size_t>(rank)];
    try {
      act(transport);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
      transport->abort("rank " + std::to_string(rank) + " has failed");
    }
  });
}

struct ProcessCase {
  std::string schedule;
  DeviceCarrier carrier;
};

class EveryScheduleOnProcesses : public ::testing::TestWithParam<ProcessCase> {
 protected:
  Transports transports(int ranks) const { return connected(ranks, options_of(GetParam().carrier)); }
  Schedule schedule(int ranks, int microbatches = 4) const {
    return generate(GetParam().schedule, {.ranks = ranks, .microbatches = microbatches});
  }
  // Each rank has a device of its own.
  static StageDevices devices_of(const Schedule& schedule) {
    return [&schedule](int stage) { return sim_device(schedule.placement().rank_of(stage)); };
  }
};
std::vector<ProcessCase> process_cases() {
  std::vector<ProcessCase> cases;
  for (const Generator& generator : generators()) {
    const Schedule schedule = generate(generator.name, {.ranks = 2, .microbatches = 2});
    if (!features_of(schedule).backward) continue;
    for (const DeviceCarrier carrier : {DeviceCarrier::Staged, DeviceCarrier::Direct}) {
      cases.push_back({std::string(generator.name), carrier});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Device, EveryScheduleOnProcesses, ::testing::ValuesIn(process_cases()),
                         [](const auto& one) { return one.param.schedule + "_" + name_of(one.param.carrier); });

TEST_P(EveryScheduleOnProcesses, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  for (const int ranks : {2, 4}) {
    const Schedule given = schedule(ranks);
    const Transports all = transports(ranks);
    for (const NamedModel& named : kModels) {
      // Random numbers are those of the device.
      const bool is_random = std::string(named.name) == "transformer";
      run(all, [&](const std::shared_ptr<Transport>& transport) {
        expect_what_one_process_gives(named, given,
                                      {.transport = transport,
                                       .devices = devices_of(given),
                                       .reference = is_random ? sim_device(0) : at::Device(at::kCPU)});
      });
      if (HasFailure()) return;
    }
  }
}

// Returns the losses and gradients of a rank after steps and evaluations of other sizes.
std::vector<at::Tensor> results_of_steps(const NamedModel& named, const Schedule& schedule, const StageDevices& devices,
                                         const std::shared_ptr<Transport>& transport, int replicas, bool sharded) {
  const Model model = named.make_on(schedule.stages(), devices);
  const auto own = schedule.placement().stages_of(transport->rank() % schedule.ranks());
  Pipeline pipeline(model.build({own.begin(), own.end()}), schedule,
                    {.transport = transport, .loss = squared_error, .sharded = sharded});
  std::vector<at::Tensor> found;
  const int replica = transport->rank() / schedule.ranks();
  for (const int size : {1, 1, 3, 2, 2, 1}) {
    const std::int64_t count = std::int64_t{size} * schedule.microbatches();
    const auto part = [&](const char* name) {
      const at::Tensor all = weight(name, {count * replicas, 4 * kWide}).detach();
      const at::Tensor whole = std::string(named.name) == "transformer" ? all : all.narrow(1, 0, kWide).contiguous();
      return whole.chunk(replicas)[static_cast<std::size_t>(replica)];
    };
    for (const at::Tensor& loss : pipeline.step({part("x")}, {}, part("y")).losses) found.push_back(loss);
    for (const at::Tensor& loss : pipeline.eval({part("z")}, {}, part("y")).losses) found.push_back(loss);
  }
  for (const PipelineStage& stage : pipeline.stages()) {
    for (const auto& [name, parameter] : stage.parameters()) {
      if (name != "tied") found.push_back(parameter.grad());
    }
  }
  return found;
}

TEST_P(EveryScheduleOnProcesses, GivesWhatTheCpuGivesInStepsOfOtherSizes) {
  const Schedule given = schedule(/*ranks=*/2);
  const Transports on_host = connected(2, {});
  const Transports on_device = transports(2);
  for (const NamedModel& named : kModels) {
    if (std::string(named.name) == "transformer") continue;
    SCOPED_TRACE(named.name);
    std::vector<std::vector<at::Tensor>> expected(2);
    run(on_host, [&](const auto& transport) {
      expected[static_cast<std::size_t>(transport->rank())] =
          results_of_steps(named, given, on_cpu, transport, /*replicas=*/1, /*sharded=*/false);
    });
    run(on_device, [&](const auto& transport) {
      expect_equal(expected[static_cast<std::size_t>(transport->rank())],
                   results_of_steps(named, given, devices_of(given), transport, /*replicas=*/1, /*sharded=*/false));
    });
    if (HasFailure()) return;
  }
}

TEST_P(EveryScheduleOnProcesses, GivesReplicasAndShardsTheGradientsThatTheyHaveOnTheCpu) {
  const Schedule given = schedule(/*ranks=*/2);
  const Transports on_host = connected(4, {});
  const Transports on_device = transports(4);
  for (const bool sharded : {false, true}) {
    for (const NamedModel& named : {kModels[0], kModels[3]}) {
      SCOPED_TRACE(std::string(named.name) + (sharded ? ", sharded" : ", replicated"));
      std::vector<std::vector<at::Tensor>> expected(4);
      run(on_host, [&](const auto& transport) {
        expected[static_cast<std::size_t>(transport->rank())] =
            results_of_steps(named, given, on_cpu, transport, /*replicas=*/2, sharded);
      });
      run(on_device, [&](const auto& transport) {
        const auto devices = [&](int) { return sim_device(transport->rank()); };
        expect_equal(expected[static_cast<std::size_t>(transport->rank())],
                     results_of_steps(named, given, devices, transport, /*replicas=*/2, sharded));
      });
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryScheduleOnProcesses, NeverWaitsForADevice) {
  const Schedule given = schedule(/*ranks=*/4, /*microbatches=*/8);
  const Transports all = transports(4);
  for (const NamedModel& named : kModels) {
    SCOPED_TRACE(named.name);
    const Model model = named.make_on(given.stages(), devices_of(given));
    std::vector<std::unique_ptr<Pipeline>> pipelines(all.size());
    run(all, [&](const std::shared_ptr<Transport>& transport) {
      const auto own = given.placement().stages_of(transport->rank());
      pipelines[static_cast<std::size_t>(transport->rank())] = std::make_unique<Pipeline>(
          model.build({own.begin(), own.end()}), given, PipelineOptions{.transport = transport, .loss = squared_error});
    });
    const at::Tensor x = input_for(named, given.microbatches(), "x").pin_memory();
    const at::Tensor y = input_for(named, given.microbatches(), "y").pin_memory();
    const std::uint64_t before = sim::counters().host_waits;
    run(all, [&](const std::shared_ptr<Transport>& transport) {
      for (int step = 0; step < 3; ++step) pipelines[static_cast<std::size_t>(transport->rank())]->step({x}, {}, y);
    });
    EXPECT_EQ(sim::counters().host_waits, before);
    run(all, [&](const std::shared_ptr<Transport>& transport) {
      pipelines[static_cast<std::size_t>(transport->rank())].reset();
    });
  }
}

// All ranks throw the same error, with their gradients from before, and continue with new transports.
TEST_P(EveryScheduleOnProcesses, RollsBackAFailedStepOnAllRanks) {
  const Schedule given = schedule(/*ranks=*/2);
  std::atomic<bool> fails = false;
  Model model = perceptron(given.stages(), devices_of(given));
  model.stages.back().forward = [&fails, calls = std::make_shared<std::atomic<int>>(0),
                                 before = model.stages.back().forward](const Args& args,
                                                                       const Kwargs& kwargs) -> c10::IValue {
    if (fails && ++*calls == 3) throw std::runtime_error("hot bearings");
    return before(args, kwargs);
  };
  std::vector<at::Tensor> before;
  for (const bool is_second : {false, true}) {
    fails = false;
    const Transports all = transports(2);
    std::vector<std::unique_ptr<Pipeline>> pipelines(2);
    const auto step = [&](const std::shared_ptr<Transport>& transport, const char* input) {
      pipelines[static_cast<std::size_t>(transport->rank())]->step({rows(8, input)}, {}, rows(8, "y"));
    };
    run(all, [&](const std::shared_ptr<Transport>& transport) {
      const auto own = given.placement().stages_of(transport->rank());
      pipelines[static_cast<std::size_t>(transport->rank())] = std::make_unique<Pipeline>(
          model.build({own.begin(), own.end()}), given, PipelineOptions{.transport = transport, .loss = squared_error});
      step(transport, "x");
      step(transport, "x");
    });
    if (is_second) continue;
    before = clones(gradients_of(model));
    fails = true;
    std::vector<std::string> errors(2);
    run(all, [&](const std::shared_ptr<Transport>& transport) {
      try {
        step(transport, "z");
      } catch (const PipelineError& error) {
        errors[static_cast<std::size_t>(transport->rank())] = error.what();
      }
    });
    for (const std::string& error : errors) EXPECT_NE(error.find("): hot bearings\n"), std::string::npos) << error;
    expect_equal(before, gradients_of(model));
    zero_grad(model);
    for (auto& pipeline : pipelines) pipeline.reset();
  }
  expect_equal(before, gradients_of(model));
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new penstock::internal::testing::Simulation);
  return RUN_ALL_TESTS();
}
