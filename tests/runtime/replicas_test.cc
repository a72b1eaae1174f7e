// Replicated, sharded and shared parameters.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

struct ReplicaCase {
  std::string schedule;
  bool sharded;
};
std::vector<ReplicaCase> replica_cases() {
  std::vector<ReplicaCase> cases;
  for (const Generator& generator : generators()) {
    if (generator.name == "ForwardOnly") continue;
    for (const bool sharded : {false, true}) cases.push_back({std::string(generator.name), sharded});
  }
  return cases;
}
class EveryScheduleWithReplicas : public ::testing::TestWithParam<ReplicaCase> {};
INSTANTIATE_TEST_SUITE_P(Threads, EveryScheduleWithReplicas, ::testing::ValuesIn(replica_cases()), [](const auto& one) {
  return one.param.schedule + (one.param.sharded ? "_sharded" : "_replicated");
});

std::vector<StagedModel> copies(const NamedModel& named, int stages, int count, std::vector<Model>& models) {
  std::vector<StagedModel> replicas;
  for (int i = 0; i < count; ++i) {
    models.push_back(named.make(stages));
    replicas.push_back(models.back().build());
  }
  return replicas;
}

// Returns the gradients of one process on the whole batch, by stage and name.
std::vector<std::map<std::string, at::Tensor>> whole_batch_gradients(const Model& model, const at::Tensor& x,
                                                                     const at::Tensor& y) {
  const PlainMicrobatch whole = plain_microbatch(model, {x}, y, 0, 1.0, {});
  std::vector<std::map<std::string, at::Tensor>> gradients;
  for (std::size_t stage = 0; stage < model.stages.size(); ++stage) {
    auto& own = gradients.emplace_back();
    for (std::size_t i = 0; i < model.stages[stage].parameters.size(); ++i) {
      own[model.stages[stage].parameters[i].first] = whole.gradients[stage][i];
    }
  }
  return gradients;
}

void expect_close(const at::Tensor& expected, const at::Tensor& found, const std::string& where) {
  ASSERT_TRUE(found.defined()) << where;
  const auto largest = expected.abs().max().item<double>();
  EXPECT_LE((expected.cpu() - found.cpu().view(expected.sizes())).abs().max().item<double>(),
            1e-6 * std::max(largest, 1e-2))
      << where << "\nexpected " << expected << "\nfound " << found;
}

// Returns the gradient of a parameter, concatenated from its shards if it is sharded.
at::Tensor gradient_of(const Pipeline& pipeline, int replicas, std::size_t stage, const std::string& name,
                       const at::Tensor& like, bool sharded) {
  std::vector<at::Tensor> parts;
  for (int replica = 0; replica < (sharded ? replicas : 1); ++replica) {
    for (const auto& [own, parameter] : pipeline.stages(replica)[stage].parameters()) {
      if (own == name && parameter.grad().defined()) parts.push_back(parameter.grad().reshape(-1));
    }
  }
  if (parts.empty()) return {};
  if (parts.front().numel() == like.numel()) return parts.front();
  return at::cat(parts).narrow(0, 0, like.numel());
}

TEST_P(EveryScheduleWithReplicas, GivesTheGradientsOfOneProcessOnTheWholeBatch) {
  constexpr int kReplicas = 2;
  constexpr int kMicrobatches = 4;
  constexpr std::int64_t kRows = kReplicas * kMicrobatches * 2;
  const Schedule schedule = generate(GetParam().schedule, {.ranks = 2, .microbatches = kMicrobatches});
  for (const NamedModel& named : {kModels[0], kModels[2], kModels[3], kModels[4], kModels[5]}) {
    SCOPED_TRACE(named.name);
    std::vector<Model> models;
    auto replicas = copies(named, schedule.stages(), kReplicas, models);
    Pipeline pipeline(std::move(replicas), schedule, {.loss = squared_error, .sharded = GetParam().sharded});
    const at::Tensor x = weight("x", {kRows, kWide}).detach();
    const at::Tensor y = weight("y", {kRows, kWide}).detach();
    const auto expected = whole_batch_gradients(named.make_on(schedule.stages(), on_first_device), x, y);

    // Two reduced steps give the sum of their gradients, and so do two of which only the second is reduced.
    for (const bool reduce_first : {true, false}) {
      for (int replica = 0; replica < kReplicas; ++replica) {
        for (const PipelineStage& stage : pipeline.stages(replica)) {
          for (const auto& [name, parameter] : stage.parameters()) parameter.mutable_grad().reset();
        }
      }
      StepOptions first;
      first.reduce = reduce_first;
      const StepResult result = pipeline.step({x}, {}, y, first);
      EXPECT_EQ(result.losses.size(), static_cast<std::size_t>(kReplicas * kMicrobatches));
      for (const double times : {1.0, 2.0}) {
        if (times > 1) pipeline.step({x}, {}, y);
        if (times == 1 && !reduce_first) continue;
        for (std::size_t stage = 0; stage < expected.size(); ++stage) {
          for (const auto& [name, gradient] : expected[stage]) {
            // A parameter that nothing uses has no gradient.
            if (!gradient.defined()) continue;
            const std::string where = "stage " + std::to_string(stage) + ", " + name;
            const at::Tensor found = gradient_of(pipeline, kReplicas, stage, name, gradient, GetParam().sharded);
            expect_close(gradient * times, found, where);
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SharedParameters, WithTensorsOfTheirOwnGetTheSumOfTheirGradients) {
  for (const char* name : {"1F1B", "ZBVZeroBubble", "Interleaved1F1B"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = generate(name, {.ranks = 2, .microbatches = 3});
    Model model = shared_across(schedule.stages());
    // The weight of the last stage becomes a copy of the tied tensor.
    const at::Tensor tied = model.stages.front().parameters.back().second;
    const at::Tensor copy = tied.detach().clone().to(test_device(schedule.stages() - 1)).requires_grad_();
    const Model plain = perceptron(schedule.stages());
    const auto last = plain.stages.back().forward;
    model.stages.back().forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      return at::matmul(last(args, kwargs).toTensor(), copy.t());
    };
    model.stages.back().parameters = plain.stages.back().parameters;
    model.stages.back().parameters.emplace_back("tied", copy);
    PipelineOptions options{.loss = squared_error};
    model.copies = {{{0, "tied"}, {schedule.stages() - 1, "tied"}}};
    Pipeline pipeline(model.build(), schedule, options);
    const at::Tensor x = weight("x", {6, kWide}).detach();
    const at::Tensor y = weight("y", {6, kWide}).detach();
    const auto expected = whole_batch_gradients(shared_across(schedule.stages(), on_first_device), x, y);
    for (const double times : {1.0, 2.0}) {
      pipeline.step({x}, {}, y);
      expect_close(expected.front().at("tied") * times, tied.grad(), "first");
      EXPECT_TRUE(same_tensor(tied.grad(), copy.grad()));
    }
  }
}

TEST(SharedParameters, MayGetTheirFirstGradientOnSeveralRanksAtOnce) {
  PENSTOCK_ON_CPU_ALONE("one tensor is on one device, and many steps of two threads seek a race between hosts");
  // The sum is of views, so that the gradients of both parameters of a stage share a storage.
  Model model(2);
  const at::Tensor tied = weight("tied", {4, kWide});
  for (int i = 0; i < 2; ++i) {
    const at::Tensor own = weight(numbered("own", i), {4, kWide});
    model.stages[static_cast<std::size_t>(i)] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                                                   return tensor(args, 0) +
                                                          (tied.view(-1) + own.view(-1)).view({4, kWide});
                                                 },
                                                 .parameters = {{"tied", tied}, {"own", own}}};
  }
  // Neither rank waits for the other before its last weight gradient.
  Pipeline pipeline(model.build(), parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I0,1I1,1W0,1W1\n"),
                    {.loss = [](const c10::IValue& output, const c10::IValue&,
                                const Kwargs&) { return (output.toTensor() * at::ones({4, kWide})).sum(); },
                     .scale_grads = false});
  for (int i = 0; i < 3000; ++i) {
    zero_grad(model);
    pipeline.step({at::zeros({8, kWide})}, {}, at::Tensor());
    ASSERT_TRUE(same_tensor(tied.grad(), at::full({4, kWide}, 4.0))) << tied.grad();
    for (const StageModule& stage : model.stages) {
      const at::Tensor& own = stage.parameters[1].second;
      ASSERT_TRUE(same_tensor(own.grad(), at::full({4, kWide}, 2.0))) << own.grad();
    }
  }
}

// The rank that represents the tensor has its own gradients early, and waits for those of the other rank.
TEST(SharedParameters, AreReducedWhenAllRanksThatHaveThemAreDone) {
  std::vector<Model> models;
  auto replicas = copies(kModels[5], 2, 2, models);
  PipelineOptions options{.loss = squared_error};
  options.functions.before = [](int rank, const Action& action) {
    if (rank == 1 && action.computation == Computation::WeightBackward && action.microbatch == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  const Schedule schedule = parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I0,1I1,1W0,1W1\n");
  Pipeline pipeline(std::move(replicas), schedule, options);
  const at::Tensor x = weight("x", {8, kWide}).detach();
  pipeline.step({x}, {}, x);
  const auto expected = whole_batch_gradients(shared_across(2, on_first_device), x, x);
  for (const Model& model : models) {
    expect_close(expected.front().at("tied"), model.stages.front().parameters.back().second.grad(), "tied");
  }
}

// A failed step or evaluation changes nothing in an accumulation.
TEST(Accumulation, ContinuesAfterAFailure) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  const at::Tensor x = weight("x", {8, kWide}).detach();
  const at::Tensor y = weight("y", {8, kWide}).detach();
  const auto expected = whole_batch_gradients(shared_across(schedule.stages(), on_first_device), x, y);
  for (const bool sharded : {false, true}) {
    std::vector<Model> models;
    auto replicas = copies(kModels[5], schedule.stages(), 2, models);
    const auto fails = std::make_shared<std::atomic<bool>>(false);
    PipelineOptions options{
        .loss = [fails](const c10::IValue& output, const c10::IValue& target, const Kwargs& kwargs) {
          if (*fails) throw std::runtime_error("no loss");
          return squared_error(output, target, kwargs);
        }};
    options.sharded = sharded;
    Pipeline pipeline(std::move(replicas), schedule, options);
    StepOptions accumulate;
    accumulate.reduce = false;
    const auto fail_twice = [&] {
      *fails = true;
      EXPECT_THROW(pipeline.eval({x}, {}, y), PipelineError);
      EXPECT_THROW(pipeline.step({x}, {}, y), PipelineError);
      *fails = false;
    };
    // A reduced step, one without a reduction and another reduced one, with failures between all of them.
    pipeline.step({x}, {}, y);
    fail_twice();
    pipeline.step({x}, {}, y, accumulate);
    fail_twice();
    pipeline.step({x}, {}, y);
    fail_twice();
    for (std::size_t stage = 0; stage < expected.size(); ++stage) {
      for (const auto& [name, gradient] : expected[stage]) {
        const std::string where = (sharded ? "sharded, stage " : "stage ") + std::to_string(stage) + ", " + name;
        expect_close(gradient * 3.0, gradient_of(pipeline, 2, stage, name, gradient, sharded), where);
      }
    }
  }
}

TEST(ShardedParameters, StayFrozen) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  std::vector<Model> models;
  auto replicas = copies(kModels[0], schedule.stages(), 2, models);
  for (const Model& model : models) model.stages[0].parameters[0].second.set_requires_grad(false);
  PipelineOptions options{.loss = squared_error};
  options.sharded = true;
  Pipeline pipeline(std::move(replicas), schedule, options);
  const at::Tensor x = weight("x", {8, kWide}).detach();
  pipeline.step({x}, {}, x);
  for (int replica = 0; replica < 2; ++replica) {
    const auto& parameters = pipeline.stages(replica)[0].parameters();
    EXPECT_FALSE(parameters[0].second.requires_grad());
    EXPECT_FALSE(parameters[0].second.grad().defined());
    EXPECT_TRUE(parameters[1].second.grad().defined());
  }
}

// Stages 0 and 2 have one tensor, and stage 1 a copy of it, which is declared shared with stage 2.
TEST(SharedParameters, ThatAreOneTensorInSomeStagesAndACopyInOthersAreOne) {
  if (test_device(0) != test_device(2)) GTEST_SKIP() << "one tensor is on one device";
  Model model = perceptron(3);
  const at::Tensor tied = model.stages[0].parameters[0].second;
  const at::Tensor bias = model.stages[2].parameters[1].second;
  model.stages[2] = {.forward = [tied, bias](const Args& args, const Kwargs&) -> c10::IValue {
                       return at::tanh(at::addmm(bias, tensor(args, 0), tied));
                     },
                     .parameters = {{"w", tied}, {"b", bias}}};
  const at::Tensor copy = model.stages[1].parameters[0].second;
  copy.set_requires_grad(false).copy_(tied.detach()).set_requires_grad(true);
  const at::Tensor x = weight("x", {6, kWide}).detach();
  const PlainMicrobatch whole = plain_microbatch(model, {x}, x, 0, 1.0, {});
  // In the plain run, the gradients of the first and the last stage are already summed.
  const at::Tensor expected = whole.gradients[0][0].cpu() + whole.gradients[1][0].cpu();
  PipelineOptions options{.loss = squared_error};
  model.copies = {{{1, "w"}, {2, "w"}}};
  for (int i = 0; i < 20; ++i) {
    zero_grad(model);
    Pipeline pipeline(model.build(), generate("GPipe", {.ranks = 3, .microbatches = 3}), options);
    pipeline.step({x}, {}, x);
    expect_close(expected, tied.grad(), "tied");
    expect_close(expected, copy.grad(), "copy");
  }
}

TEST(SharedParameters, AreRestoredAfterAFailedStep) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  std::vector<Model> models;
  auto replicas = copies(kModels[5], schedule.stages(), 2, models);
  const auto fails = std::make_shared<std::atomic<bool>>(false);
  PipelineOptions options{.loss = [fails](const c10::IValue& output, const c10::IValue& target, const Kwargs& kwargs) {
    if (*fails) throw std::runtime_error("no loss");
    return squared_error(output, target, kwargs);
  }};
  Pipeline pipeline(std::move(replicas), schedule, options);
  const at::Tensor x = weight("x", {8, kWide}).detach();
  pipeline.step({x}, {}, x);
  const at::Tensor& tied = models.front().stages.front().parameters.back().second;
  const at::Tensor before = tied.grad().clone();
  *fails = true;
  for (int i = 0; i < 3; ++i) EXPECT_THROW(pipeline.step({x}, {}, x), PipelineError);
  EXPECT_TRUE(same_tensor(before, tied.grad()));
  *fails = false;
  pipeline.step({x}, {}, x);
  expect_close(before * 2, tied.grad(), "tied");
}

}  // namespace
}  // namespace penstock::internal::testing
