// Process ranks, on the CPU or on simulated devices: see process_ranks.h. Each process runs these tests, all at the same
// time: penstock_launch 4 penstock_gloo_test.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/chunk_spec.h"
#include "penstock/transport/c10d.h"
#include "tests/runtime/accumulation.h"
#include "tests/runtime/models.h"
#include "tests/runtime/process_ranks.h"

namespace penstock::internal::testing {
namespace {

using Gloo = ProcessRanks;

std::vector<int> microbatch_counts() {
  if (runs_whole_grid()) return {1, 2, 3, 4, 8};
  return is_on_devices() ? std::vector<int>{4} : std::vector<int>{3, 4};
}

TEST_F(Gloo, EveryScheduleGivesTheLossesOutputsAndGradientsOfOneProcess) {
  int cases = 0;
  for (const Generator& generator : generators()) {
    for (const int microbatches : microbatch_counts()) {
      SCOPED_TRACE(std::string(generator.name) + ", " + std::to_string(microbatches) + " microbatches");
      const Schedule schedule = generate(generator.name, {.ranks = ranks(), .microbatches = microbatches});
      if (!features_of(schedule).backward) continue;
      for (const NamedModel& named : kModels) {
        expect_what_one_process_gives(named, schedule, {.transport = world()});
        if (HasFailure()) return;
        ++cases;
      }
    }
  }
  if (world()->rank() == 0) std::cout << "cases: " << cases << "\n";
}

// Returns the model with the stages of this process.
StagedModel own_stages(const Model& model, const Schedule& schedule) {
  const auto own = schedule.placement().stages_of(world()->rank() % schedule.ranks());
  return model.build({own.begin(), own.end()});
}

TEST_F(Gloo, ShapesAreExchangedAgainWhenTheBatchChanges) {
  for (const NamedModel& named : {kModels[0], kModels[2], kModels[3]}) {
    for (const char* name : {"GPipe", "Interleaved1F1B", "ZBVZeroBubble"}) {
      SCOPED_TRACE(std::string(named.name) + ", " + name);
      const Schedule schedule = generate(name, {.ranks = ranks(), .microbatches = 4});
      const Model model = named.make(schedule.stages());
      PipelineOptions options{.transport = world(), .loss = squared_error};
      Pipeline pipeline(own_stages(model, schedule), schedule, options);
      StepOptions everywhere;
      everywhere.results_everywhere = true;
      std::int64_t step = 0;
      struct Kind {
        std::int64_t count;
        bool autocast;
      };
      // The same batch size twice, a larger and a smaller one, one with fewer rows in the last microbatch; then
      // autocast.
      for (const auto [count, autocast] :
           {Kind{8, false}, Kind{8, false}, Kind{32, false}, Kind{4, false}, Kind{4, false}, Kind{9, false},
            Kind{9, false}, Kind{8, false}, Kind{8, true}, Kind{8, true}, Kind{8, false}}) {
        SCOPED_TRACE(std::to_string(count) + (autocast ? ", bfloat16" : ""));
        const AutocastScope scope(test_device(0).type(), at::kBFloat16, autocast);
        const at::Tensor x = rows(count, "x");
        const at::Tensor y = rows(count, "y");
        const PlainOptions plain_options{.step = step};
        const auto expected = plain(model, x, y, 4, plain_options);
        zero_grad(model);
        const StepResult result = pipeline.step({x}, {}, y, everywhere);
        ++step;
        ASSERT_EQ(result.losses.size(), 4U);
        for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(same_tensor(expected[i].loss, result.losses[i]));
        EXPECT_TRUE(same_tensor(outputs_of(expected), result.output.toTensor()));
        const auto sums = added_up(pipeline.schedule(), expected);
        for (const PipelineStage& stage : pipeline.stages()) {
          const auto at = static_cast<std::size_t>(stage.stage_index());
          for (std::size_t i = 0; i < stage.module().parameters.size(); ++i) {
            EXPECT_TRUE(same_tensor(sums[at][i], stage.module().parameters[i].second.grad()));
          }
        }
        // Evaluations between the steps, with and without a target.
        const StepResult seen = pipeline.eval({x}, {}, count > 8 ? c10::IValue(y) : c10::IValue(), everywhere);
        ++step;
        EXPECT_EQ(seen.losses.size(), count > 8 ? 4U : 0U);
        EXPECT_EQ(seen.output.toTensor().size(0), count);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Gloo, ResultsAreThoseOfTheLastStageUnlessAskedForEverywhere) {
  const Schedule schedule = generate("1F1B", {.ranks = ranks(), .microbatches = 2});
  Model model = perceptron(schedule.stages());
  // The last stage returns a dict, and every stage adds a loss term.
  const auto last = model.stages.back().forward;
  model.stages.back().forward = [last](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    c10::Dict<std::string, at::Tensor> output;
    output.insert("out", last(args, kwargs).toTensor());
    return output;
  };
  for (StageModule& stage : model.stages) {
    stage.forward = [before = stage.forward](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      add_loss(at::ones({}));
      return before(args, kwargs);
    };
  }
  PipelineOptions options{.transport = world(),
                          .loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) {
                            return output.toGenericDict().at("out").toTensor().mean();
                          }};
  Pipeline pipeline(own_stages(model, schedule), schedule, options);
  const bool has_last = world()->rank() == ranks() - 1;
  for (const bool everywhere : {false, true, false}) {
    for (const bool outputs : {true, false}) {
      StepOptions step;
      step.results_everywhere = everywhere;
      step.return_outputs = outputs;
      const StepResult result = pipeline.step({rows(4, "x")}, {}, rows(4, "y"), step);
      const bool has = has_last || everywhere;
      EXPECT_EQ(result.losses.size(), has ? 2U : 0U);
      EXPECT_EQ(result.output.isGenericDict(), has && outputs);
      if (has && outputs) {
        EXPECT_EQ(result.output.toGenericDict().at("out").toTensor().size(0), 4);
      }
      ASSERT_EQ(result.loss_terms.size(), 2U);
      for (const auto& terms : result.loss_terms) {
        EXPECT_EQ(terms.size(), everywhere ? static_cast<std::size_t>(ranks()) : 1U);
      }
    }
  }
}

// Tests several replicas of a pipeline of two ranks.
TEST_F(Gloo, ReplicasGiveTheGradientsOfOneProcessOnTheWholeBatch) {
  constexpr int kMicrobatches = 4;
  if (ranks() % 2 != 0) return;
  const int replicas = ranks() / 2;
  const std::int64_t count = std::int64_t{2} * kMicrobatches * replicas;
  for (const Generator& generator : generators()) {
    const Schedule schedule = generate(generator.name, {.ranks = 2, .microbatches = kMicrobatches});
    if (!features_of(schedule).backward) continue;
    for (const bool sharded : {false, true}) {
      for (const NamedModel& named : {kModels[0], kModels[3], kModels[5]}) {
        SCOPED_TRACE(std::string(generator.name) + (sharded ? ", sharded, " : ", replicated, ") + named.name);
        const Model model = named.make(schedule.stages());
        const Model again = named.make_on(schedule.stages(), on_first_device);
        PipelineOptions options{.transport = world(), .loss = squared_error, .sharded = sharded};
        Pipeline pipeline(own_stages(model, schedule), schedule, options);
        const at::Tensor x = rows(count, "x");
        const at::Tensor y = rows(count, "y");
        const auto whole = plain_microbatch(again, {x}, y, 0, 1.0, {}).gradients;
        const int replica = world()->rank() / 2;
        const auto part = [&](const at::Tensor& all) { return all.chunk(replicas)[static_cast<std::size_t>(replica)]; };
        // Two steps, of which only the second reduces, give the sum.
        StepOptions first;
        first.reduce = false;
        pipeline.step({part(x)}, {}, part(y), first);
        pipeline.step({part(x)}, {}, part(y));
        for (const PipelineStage& stage : pipeline.stages()) {
          const auto at = static_cast<std::size_t>(stage.stage_index());
          for (const auto& [name, parameter] : stage.parameters()) {
            for (std::size_t i = 0; i < again.stages[at].parameters.size(); ++i) {
              if (again.stages[at].parameters[i].first != name || !whole[at][i].defined()) continue;
              at::Tensor expected = whole[at][i].reshape(-1) * 2;
              at::Tensor found = parameter.grad().reshape(-1);
              if (found.numel() != expected.numel()) {
                const std::int64_t begin = replica * found.numel();
                const std::int64_t length = std::clamp<std::int64_t>(expected.numel() - begin, 0, found.numel());
                expected = expected.narrow(0, std::min(begin, expected.numel()), length);
                found = found.narrow(0, 0, length);
              }
              if (expected.numel() == 0) continue;
              EXPECT_LE((expected.cpu() - found.cpu()).abs().max().item<double>(),
                        1e-6 * std::max(whole[at][i].abs().max().item<double>() * 2, 1e-2))
                  << "stage " << at << ", " << name;
            }
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Bitwise, as the sums over members are formed in the same order.
TEST_F(Gloo, ReplicasAndShardsHaveTheGradientsOfTheCpu) {
  if (!is_on_devices()) GTEST_SKIP() << "compares devices with the CPU";
  if (ranks() % 2 != 0) return;
  const int replicas = ranks() / 2;
  const at::Tensor x =
      rows(std::int64_t{8} * replicas, "x").chunk(replicas)[static_cast<std::size_t>(world()->rank() / 2)];
  for (const Generator& generator : generators()) {
    const Schedule schedule = generate(generator.name, {.ranks = 2, .microbatches = 4});
    if (!features_of(schedule).backward) continue;
    for (const bool sharded : {false, true}) {
      for (const NamedModel& named : {kModels[0], kModels[2], kModels[3], kModels[4]}) {
        SCOPED_TRACE(std::string(generator.name) + (sharded ? ", sharded, " : ", replicated, ") + named.name);
        const auto results_on = [&](const StageDevices& devices) {
          const Model model = named.make_on(schedule.stages(), devices);
          PipelineOptions options{.transport = world(), .loss = squared_error, .sharded = sharded};
          Pipeline pipeline(own_stages(model, schedule), schedule, options);
          StepOptions first;
          first.reduce = false;
          const std::uint64_t waits = host_waits();
          pipeline.step({x}, {}, x, first);
          std::vector<at::Tensor> found = pipeline.step({x * 2}, {}, x).losses;
          EXPECT_EQ(host_waits(), waits);
          for (const PipelineStage& stage : pipeline.stages()) {
            for (const auto& [name, parameter] : stage.parameters()) found.push_back(parameter.grad());
          }
          return found;
        };
        expect_equal(results_on(on_cpu), results_on(test_device));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Gloo, AccumulationGivesTheGradientsOfOneProcessWhateverIsCleared) {
  if (ranks() % 2 != 0) return;
  // Parameters that require a gradient change from step to step.
  const std::shared_ptr<Transport> transport = new_transport({.dynamic_shapes = true});
  for (const bool sharded : {false, true}) {
    for (const Sharing sharing : {Sharing::None, Sharing::Copies}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        expect_accumulation_of_one_process({.replicas = ranks() / 2, .sharded = sharded, .sharing = sharing}, seed,
                                           transport);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Gloo, OutputsThatCannotBeMergedFailTheStepOnAllRanks) {
  const Schedule schedule = generate("1F1B", {.ranks = ranks(), .microbatches = 4});
  Model model = perceptron(schedule.stages());
  model.stages.back().forward = [before = model.stages.back().forward](const Args& args,
                                                                       const Kwargs& kwargs) -> c10::IValue {
    return before(args, kwargs).toTensor().mean();
  };
  // The transport cannot be used afterwards.
  PipelineOptions options{
      .transport = new_transport(),
      .loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) { return output.toTensor(); }};
  Pipeline pipeline(own_stages(model, schedule), schedule, options);
  StepOptions without;
  without.return_outputs = false;
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"), without);
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : pipeline.stages()[0].parameters()) gradients.push_back(parameter.grad());
  const std::vector<at::Tensor> before = clones(gradients);
  try {
    pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PipelineError& error) {
    EXPECT_NE(std::string(error.what()).find("the outputs of the microbatches cannot be merged: chunks[0]: found "),
              std::string::npos)
        << error.what();
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& found = pipeline.stages()[0].parameters()[i].second.grad();
    EXPECT_TRUE(found.is_same(gradients[i])) << i;
    EXPECT_TRUE(same_tensor(found, before[i])) << i;
  }
}

// The other ranks are notified in this step or the next.
TEST_F(Gloo, AMergeThatFailsAfterTheBackwardsEndsThePipelineOnAllRanks) {
  const Schedule schedule = generate("1F1B", {.ranks = ranks(), .microbatches = 4});
  const Model model = perceptron(schedule.stages());
  PipelineOptions options{.transport = new_transport(), .loss = squared_error};
  options.output_merge_spec = CustomReducer(
      at::zeros({}), [](const c10::IValue&, const c10::IValue&) -> c10::IValue { throw std::runtime_error("no sum"); });
  Pipeline pipeline(own_stages(model, schedule), schedule, options);
  const auto step = [&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); };
  if (world()->rank() == ranks() - 1) {
    EXPECT_THROW(step(), ChunkError);
    for (const auto& [name, parameter] : pipeline.stages()[0].parameters()) EXPECT_FALSE(parameter.grad().defined());
    EXPECT_THROW(step(), PipelineError);
  } else {
    EXPECT_THROW(
        {
          step();
          step();
        },
        PipelineError);
  }
}

// The length of the output depends on its values.
TEST_F(Gloo, DynamicShapesMayChangeWithEveryMicrobatch) {
  const Schedule schedule = generate("1F1B", {.ranks = ranks(), .microbatches = 4});
  Model model = perceptron(schedule.stages());
  model.stages.front().forward = [before = model.stages.front().forward](const Args& args,
                                                                         const Kwargs& kwargs) -> c10::IValue {
    const at::Tensor y = before(args, kwargs).toTensor();
    return y.narrow(0, 0, 1 + static_cast<std::int64_t>(tensor(args, 0)[0][0].item<float>()));
  };
  at::Tensor x = rows(20, "x");
  for (const bool dynamic : {true, false}) {
    PipelineOptions options{.transport = new_transport({.dynamic_shapes = dynamic}),
                            .loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) {
                              return output.toTensor().square().sum();
                            }};
    Pipeline pipeline(own_stages(model, schedule), schedule, options);
    StepOptions everywhere;
    everywhere.results_everywhere = true;
    const auto lengths = [&](std::vector<int> all) {
      for (std::size_t i = 0; i < all.size(); ++i) x[static_cast<std::int64_t>(5 * i)][0] = all[i] - 1;
    };
    const bool may_change = dynamic || ranks() == 1;
    // A rank may still be in the first step when another fails in the second.
    try {
      lengths({1, 5, 2, 3});
      EXPECT_EQ(pipeline.step({x}, {}, x, everywhere).output.toTensor().size(0), 11);
      lengths({4, 1, 1, 2});
      EXPECT_EQ(pipeline.step({x}, {}, x, everywhere).output.toTensor().size(0), 8);
      EXPECT_TRUE(may_change);
    } catch (const PipelineError& error) {
      const std::string what = error.what();
      EXPECT_FALSE(may_change) << what;
      EXPECT_EQ(what.find("rank 0, stage 0, 0SEND_F0 (microbatch 0): tensor 0 of message 0 of channel 0 to rank 1 is"),
                0U)
          << what;
      EXPECT_NE(what.find("dynamic_shapes"), std::string::npos) << what;
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
