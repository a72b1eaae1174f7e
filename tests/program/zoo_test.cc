// Compares the programs of the zoo with eager PyTorch, and with themselves in stages.
#include "tests/program/zoo.h"

#include <ATen/ops/abs.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/program/piped.h"
#include "tests/stage/recomputed_part.h"

namespace penstock::internal::testing {

namespace {

// Returns the largest difference, relative to the largest element or to 1.
double difference(const at::Tensor& expected, const at::Tensor& found) {
  if (expected.sizes() != found.sizes()) return std::numeric_limits<double>::infinity();
  if (expected.numel() == 0) return 0;
  const auto type = expected.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor wide = expected.detach().to(type);
  const double scale = std::max(1.0, wide.abs().max().item<double>());
  return (wide - found.detach().to(type)).abs().max().item<double>() / scale;
}

void expect_near(const TensorsByName& expected, const TensorsByName& found, double tolerance) {
  for (const auto& [name, tensor] : expected) {
    const auto other = found.find(name);
    if (other == found.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    EXPECT_LE(difference(tensor, other->second), tolerance) << name;
  }
}

TensorsByName renamed(const std::string& prefix, const NamedTensors& tensors) {
  TensorsByName result;
  for (const auto& [name, tensor] : tensors) result.emplace(prefix + name, tensor);
  return result;
}

// Recurrent layers of a device are computed by other operators than those of the CPU, which round in another way.
constexpr std::string_view kRecurrent = "lstm";

void expect_on_device_what_the_cpu_gives(const ZooModel& model) {
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  const Schedule schedule = generate("GPipe", {.ranks = 1, .microbatches = model.microbatches});
  const auto run_on = [&](at::Device device) {
    return run_in_one_process(pipeline(model.program(), 1), schedule, inputs, /*seed=*/0, device);
  };
  const Outcome expected = run_on(at::kCPU);
  const Outcome found = run_on(test_device(0));
  if (model.name != kRecurrent) {
    expect_same(expected, found);
    return;
  }
  expect_near(expected.outputs, found.outputs, model.tolerance);
  for (const auto& [place, gradient] : expected.gradients) {
    EXPECT_LE(difference(gradient, found.gradients.at(place)), model.tolerance) << place.second;
  }
}

TEST(ZooFolder, HasModels) {
  EXPECT_FALSE(zoo_names().empty()) << "PENSTOCK_ZOO should be a folder that zoo.py has written.";
}

class Zoo : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (model.name == "sparse_gradients") PENSTOCK_ON_CPU_ALONE("the simulated device has no sparse tensors");
  }

  const ZooModel model = zoo_model(GetParam());
};

// On a device, the program has the results of the CPU too: bitwise, unless its operators are others there.
TEST_P(Zoo, RunsAsEagerPyTorchDoes) {
  if (is_on_devices()) {
    expect_on_device_what_the_cpu_gives(model);
    return;
  }
  const Program program = model.program();
  std::vector<c10::IValue> outputs;
  for (const Arguments& arguments : microbatches_of(model, program)) {
    outputs.push_back(program.run(arguments.args, arguments.kwargs));
    (sum_of_means(outputs.back()) / model.microbatches).backward();
  }
  TensorsByName found = outputs_by_name(outputs);
  for (const auto& [name, parameter] : program.parameters()) {
    if (parameter.grad().defined()) found.emplace("grad." + name, parameter.grad());
  }
  found.merge(renamed("buffer.", program.buffers()));
  expect_near(tensors_of(model.path(".expected.safetensors")), found, model.tolerance);
}

// A step is bitwise identical to one process; gradients of shared parameters agree to 1e-6 of the largest.
void expect_what_one_process_gives(const ZooModel& model, const std::function<Pipe(const Program&)>& cut,
                                   const Schedule& schedule) {
  penstock::internal::testing::expect_what_one_process_gives([&] { return cut(model.program()); }, schedule,
                                                             tensors_of(model.path(".inputs.safetensors")));
}

TEST_P(Zoo, GivesTheSameInStagesWhereverItIsCut) {
  for (const ZooCut& cut : model.cuts) {
    SCOPED_TRACE(cut.why);
    const auto pipe = [&](const Program& program) { return pipeline(program, cut.at); };
    ASSERT_EQ(pipe(model.program()).num_stages(), cut.stages);
    const Schedule schedule = generate("1F1B", {.ranks = cut.stages, .microbatches = model.microbatches});
    expect_what_one_process_gives(model, pipe, schedule);
  }
}

TEST_P(Zoo, GivesTheSameWithEverySchedule) {
  struct Case {
    const char* schedule;
    int ranks;
    int stages_per_rank;
  };
  const std::vector<Case> cases = {{"1F1B", 1, 1},
                                   {"1F1B", 2, 1},
                                   {"1F1B", 3, 1},
                                   {"1F1B", 4, 1},
                                   {"Interleaved1F1B", 1, 2},
                                   {"Interleaved1F1B", 1, 4},
                                   {"Interleaved1F1B", 2, 2},
                                   {"ZBVZeroBubble", 1, 2},
                                   {"ZBVZeroBubble", 2, 2},
                                   {"DualPipeV", 1, 2},
                                   {"DualPipeV", 2, 2}};
  for (const Case& one : cases) {
    SCOPED_TRACE(std::string(one.schedule) + " on " + std::to_string(one.ranks) + " ranks");
    const Schedule schedule = generate(
        one.schedule, {.ranks = one.ranks, .stages_per_rank = one.stages_per_rank, .microbatches = model.microbatches});
    expect_what_one_process_gives(
        model, [&](const Program& program) { return pipeline(program, schedule.stages()); }, schedule);
  }
}

// Modules to recompute: those that the model repeats, or its own children.
std::vector<std::string> modules_of(const Program& program) {
  std::vector<std::string> modules = program.repeated_modules();
  if (!modules.empty()) return modules;
  for (const ModuleCall& call : program.graph().calls) {
    if (!call.path.empty() && call.path.find('.') == std::string::npos) modules.push_back(call.path);
  }
  return modules;
}

TEST_P(Zoo, GivesTheSameWhenItIsRecomputed) {
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  for (const char* name : {"GPipe", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = generate(name, {.ranks = 2, .microbatches = model.microbatches});
    const auto make = [&] { return pipeline(model.program(), schedule.stages()); };
    const Outcome expected = run_in_one_process(make(), schedule, inputs, /*seed=*/0);
    {
      const Pipe pipe = make();
      Program program = pipe.program();
      program.recompute(modules_of(program));
      const CountedParts counted;
      expect_same(expected, run_in_stages(pipe, schedule, inputs, /*seed=*/0), pipe.shared_parameters());
      // The backward does not need what every part has saved, such as one whose result is overwritten.
      EXPECT_GT(counted.recomputed(), 0);
      EXPECT_LE(counted.recomputed(), counted.made());
    }
    const Pipe pipe = make();
    const CountedParts counted;
    expect_same(expected, run_in_stages(pipe, add_recomputation(schedule), inputs, /*seed=*/0),
                pipe.shared_parameters());
    EXPECT_GT(counted.made(), 0);
    EXPECT_EQ(counted.recomputed(), counted.made());
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Zoo);
INSTANTIATE_TEST_SUITE_P(All, Zoo, ::testing::ValuesIn(zoo_names()), [](const auto& one) { return one.param; });

}  // namespace
}  // namespace penstock::internal::testing
