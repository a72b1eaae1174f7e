// Pipelines of process ranks on the simulated accelerator, here on threads of one process, which may share devices: the
// same numbers as on the CPU and no races between streams, whichever way device tensors take between the ranks.
// gloo_test.cc has real processes.
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
#include "tests/runtime/overlap.h"
#include "tests/runtime/process_ranks.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

// The transports of all ranks, which leave at the same time, as processes do.
class Transports : public std::vector<std::shared_ptr<Transport>> {
 public:
  explicit Transports(int ranks) : vector(static_cast<std::size_t>(ranks)) {}
  Transports(Transports&&) = default;
  Transports& operator=(Transports&&) = delete;
  ~Transports() {
    on_threads(static_cast<int>(size()), [this](int rank) { (*this)[static_cast<std::size_t>(rank)].reset(); });
  }
};

Transports connected(int ranks, const C10dOptions& options) {
  Transports transports(ranks);
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
  // Ranks are dealt to the devices. Without a number, each rank has a device of its own.
  static StageDevices devices_of(const Schedule& schedule, int count = 4) {
    return [&schedule, count](int stage) { return sim_device(schedule.placement().rank_of(stage) % count); };
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

struct Grid {
  int ranks;
  int devices;
};

// Messages from device to device need a device for each rank, as NCCL refuses two ranks of a group on one GPU.
std::vector<Grid> grids_of(DeviceCarrier carrier) {
  std::vector<Grid> grids{{.ranks = 4, .devices = 4}};
  if (carrier == DeviceCarrier::Staged) grids.push_back({.ranks = 2, .devices = 1});
  if (!runs_whole_grid()) return grids;
  grids.push_back({.ranks = 2, .devices = 2});
  if (carrier == DeviceCarrier::Direct) return grids;
  for (const int devices : {1, 2}) grids.push_back({.ranks = 4, .devices = devices});
  return grids;
}

TEST_P(EveryScheduleOnProcesses, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  for (const auto [ranks, devices] : grids_of(GetParam().carrier)) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks on " + std::to_string(devices) + " devices");
    const Schedule given = schedule(ranks);
    const Transports all = transports(ranks);
    for (const NamedModel& named : kModels) {
      run(all, [&, count = devices](const std::shared_ptr<Transport>& transport) {
        // Other ranks read their results meanwhile.
        expect_what_one_process_gives(
            named, given, {.transport = transport, .devices = devices_of(given, count), .counts_host_waits = false});
      });
      if (HasFailure()) return;
    }
  }
}

// Returns the losses and gradients of a rank after steps and evaluations of other sizes.
std::vector<at::Tensor> results_of_steps(const NamedModel& named, const Schedule& schedule, const StageDevices& devices,
                                         const std::shared_ptr<Transport>& transport) {
  const Model model = named.make_on(schedule.stages(), devices);
  const auto own = schedule.placement().stages_of(transport->rank());
  Pipeline pipeline(model.build({own.begin(), own.end()}), schedule, {.transport = transport, .loss = squared_error});
  std::vector<at::Tensor> found;
  for (const int size : {1, 1, 3, 2, 2, 1}) {
    const auto part = [&](const char* name) { return rows(std::int64_t{size} * schedule.microbatches(), name); };
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
    if (is_random(named)) continue;
    // The longer grid has all models.
    if (!runs_whole_grid() && std::string(named.name) != "several_tensors") continue;
    SCOPED_TRACE(named.name);
    std::vector<std::vector<at::Tensor>> expected(2);
    run(on_host, [&](const auto& transport) {
      expected[static_cast<std::size_t>(transport->rank())] = results_of_steps(named, given, on_cpu, transport);
    });
    run(on_device, [&](const auto& transport) {
      expect_equal(expected[static_cast<std::size_t>(transport->rank())],
                   results_of_steps(named, given, devices_of(given), transport));
    });
    if (HasFailure()) return;
  }
}

// Sends and receives of a rank are measured by its own device.
TEST_P(EveryScheduleOnProcesses, TellsWhenMessagesWereTransferred) {
  const Schedule given = schedule(/*ranks=*/2);
  const Transports all = transports(2);
  const NamedModel& named = kModels[0];
  const Model model = named.make_on(given.stages(), devices_of(given));
  const at::Tensor x = input_for(named, given.microbatches(), "x");
  const at::Tensor y = input_for(named, given.microbatches(), "y");
  run(all, [&](const std::shared_ptr<Transport>& transport) {
    const int rank = transport->rank();
    const auto own = given.placement().stages_of(rank);
    Pipeline pipeline(model.build({own.begin(), own.end()}), given, {.transport = transport, .loss = squared_error});
    for (int step = 0; step < 3; ++step) {
      pipeline.step({x}, {}, y);
      const std::vector<ActionRecord>& record = pipeline.record()[static_cast<std::size_t>(rank)];
      const auto actions = pipeline.recorded_schedule().actions(rank);
      ASSERT_EQ(record.size(), actions.size());
      std::int64_t end_of_last = 0;
      for (std::size_t i = 0; i < actions.size(); ++i) {
        SCOPED_TRACE(to_string(actions[i]) + " of rank " + std::to_string(rank) + " in step " + std::to_string(step));
        EXPECT_EQ(record[i].has_transfer(), actions[i].is_message());
        if (actions[i].is_message()) {
          EXPECT_EQ(record[i].peer, 1 - rank);
          EXPECT_GT(record[i].bytes, 0);
          EXPECT_LE(record[i].transfer_start, record[i].transfer_end);
        }
        // Messages are sent after the computation that made them.
        if (actions[i].is_send()) {
          EXPECT_GE(record[i].transfer_start, end_of_last);
        }
        if (actions[i].is_compute()) end_of_last = record[i].end;
      }
    }
  });
}

class DeviceProcesses : public ::testing::TestWithParam<DeviceCarrier> {};
INSTANTIATE_TEST_SUITE_P(Device, DeviceProcesses, ::testing::Values(DeviceCarrier::Staged, DeviceCarrier::Direct),
                         [](const auto& one) { return name_of(one.param); });

TEST_P(DeviceProcesses, ShowATransferBesideAComputation) {
  const Transports all = connected(2, options_of(GetParam()));
  const OverlappedTransfer overlapped;
  const Schedule schedule = gpipe(/*ranks=*/2, /*microbatches=*/2);
  run(all, [&](const std::shared_ptr<Transport>& transport) {
    const int rank = transport->rank();
    const at::Device device = sim_device(rank);
    std::vector<PipelineStage> stages;
    stages.emplace_back(rank == 0 ? overlapped.first(device) : overlapped.second(device), rank, 2,
                        StageOptions{.device = device});
    Pipeline pipeline(std::move(stages), schedule, {.transport = transport, .loss = squared_error});
    pipeline.step({overlapped.input()}, {}, at::zeros({OverlappedTransfer::kRows, kWide}));
    const Record record = pipeline.record();
    if (rank == 1) overlapped.expect_overlap(pipeline.recorded_schedule(), record[1]);
  });
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
