// Weighted microbatches: losses and gradients equal those of the whole batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/torch_names.h"
#include "penstock/transport/c10d.h"
#include "tests/runtime/models.h"
#include "tests/thrown.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr std::int64_t kRows = 13;
constexpr std::int64_t kIgnored = -100;

at::Tensor cross_entropy(const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
  return at::cross_entropy_loss(output.toTensor(), target.toTensor());
}

// Returns classes of rows, of which those in [first, last) are ignored.
at::Tensor classes(std::int64_t rows, std::int64_t first, std::int64_t last) {
  at::Tensor target = at::arange(rows, at::kLong).mul(3).remainder(kWide);
  target.slice(0, first, last).fill_(kIgnored);
  return target;
}

struct WholeBatch {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

// Runs the whole batch in one process, without microbatches.
WholeBatch whole_batch(const Model& model, const at::Tensor& x, const at::Tensor& target, const LossFunction& loss) {
  zero_grad(model);
  const at::Tensor value = forward_of(model, x);
  const at::Tensor found = loss(value, target.to(value.device()), {});
  found.backward();
  WholeBatch whole{.loss = found.item<double>(), .gradients = clones(gradients_of(model))};
  zero_grad(model);
  return whole;
}

void expect_near(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(found[i].defined()) << i;
    const at::Tensor gradient = found[i].cpu().view(expected[i].sizes());
    EXPECT_LE((expected[i] - gradient).abs().max().item<double>(), 1e-6)
        << i << "\nexpected " << expected[i] << "\nfound " << gradient;
  }
}

TEST(LossWeight, OfRowsGivesTheLossAndGradientsOfTheWholeBatch) {
  const at::Tensor x = rows(kRows, "x");
  const at::Tensor y = rows(kRows, "y");
  for (const char* name : {"GPipe", "1F1B", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = generate(name, {.ranks = 2, .microbatches = 8});
    const Model model = perceptron(schedule.stages());
    const WholeBatch whole = whole_batch(model, x, y, squared_error);
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error, .loss_weight = count_rows()});
    const StepResult result = pipeline.step({x}, {}, y);
    EXPECT_EQ(result.weights, (std::vector<double>{2, 2, 2, 2, 2, 1, 1, 1}));
    EXPECT_NEAR(result.loss(), whole.loss, 1e-6);
    expect_near(whole.gradients, gradients_of(model));
    EXPECT_NEAR(pipeline.eval({x}, {}, y).loss(), whole.loss, 1e-6);
    // Without a weight all microbatches count alike, as in torch.distributed.pipelining.
    zero_grad(model);
    Pipeline alike(model.build(), schedule, {.loss = squared_error});
    const StepResult unweighted = alike.step({x}, {}, y);
    EXPECT_TRUE(unweighted.weights.empty());
    EXPECT_GT(std::abs(unweighted.loss() - whole.loss), 1e-4);
  }
}

TEST(LossWeight, OfTargetsLeavesOutWhatIsIgnored) {
  const at::Tensor x = rows(kRows, "x");
  // Microbatches of 2, 2, 2, 2, 2, 1, 1 and 1 rows: all rows of the second and half of the third are ignored.
  const at::Tensor target = classes(kRows, 2, 5);
  const Model model = perceptron(2);
  const WholeBatch whole = whole_batch(model, x, target, cross_entropy);
  Schedule1F1B pipeline(model.build(), 8, {.loss = cross_entropy, .loss_weight = count_targets()});
  const StepResult result = pipeline.step({x}, {}, target);
  EXPECT_EQ(result.weights, (std::vector<double>{2, 0, 1, 2, 2, 1, 1, 1}));
  EXPECT_NEAR(result.loss(), whole.loss, 1e-6);
  EXPECT_EQ(result.losses[1].item<double>(), 0);
  expect_near(whole.gradients, gradients_of(model));
  EXPECT_NEAR(pipeline.eval({x}, {}, target).loss(), whole.loss, 1e-6);
  // Another ignore_index, and a batch in which all targets are ignored.
  EXPECT_EQ(count_targets(3)(classes(kRows, 0, 0), {}), 11);
  zero_grad(model);
  const StepResult nothing = pipeline.step({x}, {}, classes(kRows, 0, kRows));
  EXPECT_TRUE(std::isnan(nothing.loss()));
  for (const at::Tensor& gradient : gradients_of(model)) EXPECT_EQ(gradient.abs().max().item<double>(), 0);
}

TEST(LossWeight, IsTheTotalOverAnAccumulation) {
  const Model model = perceptron(2);
  const at::Tensor x = rows(kRows + 8, "x");
  const at::Tensor target = classes(kRows + 8, 11, 18);
  const WholeBatch whole = whole_batch(model, x, target, cross_entropy);
  Schedule1F1B pipeline(model.build(), 8, {.loss = cross_entropy, .loss_weight = count_targets()});
  StepOptions options;
  options.total_weight = kRows + 8 - 7;
  options.reduce = false;
  pipeline.step({x.narrow(0, 0, kRows)}, {}, target.narrow(0, 0, kRows), options);
  options.reduce = true;
  pipeline.step({x.narrow(0, kRows, 8)}, {}, target.narrow(0, kRows, 8), options);
  expect_near(whole.gradients, gradients_of(model));
}

TEST(LossWeight, IsSharedByReplicas) {
  const at::Tensor x = rows(kRows, "x");
  const at::Tensor target = classes(kRows, 0, 5);
  const WholeBatch whole = whole_batch(perceptron(2), x, target, cross_entropy);
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded);
    std::vector<Model> models;
    std::vector<StagedModel> replicas;
    for (int i = 0; i < 2; ++i) {
      models.push_back(perceptron(2));
      replicas.push_back(models.back().build());
    }
    Pipeline pipeline(std::move(replicas), generate("1F1B", {.ranks = 2, .microbatches = 3}),
                      {.loss = cross_entropy, .loss_weight = count_targets(), .sharded = sharded});
    const StepResult result = pipeline.step({x}, {}, target);
    EXPECT_NEAR(result.loss(), whole.loss, 1e-6);
    std::vector<at::Tensor> found;
    for (std::size_t stage = 0; stage < 2; ++stage) {
      for (std::size_t i = 0; i < 2; ++i) {
        std::vector<at::Tensor> parts;
        for (int replica = 0; replica < (sharded ? 2 : 1); ++replica) {
          parts.push_back(pipeline.stages(replica)[stage].parameters()[i].second.grad().cpu().reshape(-1));
        }
        found.push_back(at::cat(parts));
      }
    }
    expect_near(whole.gradients, found);
  }
}

// Two replicas of two process ranks, on threads of this process. The first stage adds a loss term, which has the weight
// of its microbatch although only the process of the last stage has the target.
TEST(LossWeight, IsSharedByProcesses) {
  const at::Tensor x = rows(kRows, "x");
  const at::Tensor target = classes(kRows, 2, 5);
  const auto make = [] {
    Model model = perceptron(2);
    model.stages[0].forward = [before = model.stages[0].forward](const Args& args,
                                                                 const Kwargs& kwargs) -> c10::IValue {
      const c10::IValue output = before(args, kwargs);
      add_loss(output.toTensor().square().mean());
      return output;
    };
    return model;
  };
  // The term of a microbatch is the mean over its rows, weighted by its targets.
  const Model plain = perceptron(2);
  double total = 0;
  std::vector<Args> microbatches;
  for (int replica = 0; replica < 2; ++replica) {
    const Args part = split_args_kwargs_into_chunks({x, target}, {}, 2).args[static_cast<std::size_t>(replica)];
    for (Args& one : split_args_kwargs_into_chunks(part, {}, 3).args) microbatches.push_back(std::move(one));
  }
  at::Tensor sum = at::zeros({});
  double expected_loss[2] = {0, 0};
  for (std::size_t i = 0; i < microbatches.size(); ++i) {
    const double weight = count_targets()(microbatches[i][1], {});
    total += weight;
    if (weight == 0) continue;
    const at::Tensor middle = forward_of(plain, 0, microbatches[i][0].toTensor());
    const at::Tensor output = forward_of(plain, 1, middle).cpu();
    const at::Tensor loss = cross_entropy(output, microbatches[i][1], {});
    expected_loss[i / 3] += weight * loss.item<double>();
    sum = sum + weight * (loss + middle.square().mean().cpu());
  }
  sum.div(total).backward();

  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Model> models;
  for (int rank = 0; rank < 4; ++rank) models.push_back(make());
  on_threads(4, [&](int rank) {
    const auto stage = static_cast<std::size_t>(rank % 2);
    const Model& model = models[static_cast<std::size_t>(rank)];
    PipelineOptions options{.transport = c10d_transport(store, rank, 4), .loss = cross_entropy};
    options.loss_weight = count_targets();
    options.timeout = std::chrono::seconds(60);
    Pipeline pipeline(model.build({rank % 2}), generate("1F1B", {.ranks = 2, .microbatches = 3}), options);
    const Args part = split_args_kwargs_into_chunks({x, target}, {}, 2).args[static_cast<std::size_t>(rank / 2)];
    StepOptions everywhere;
    everywhere.results_everywhere = true;
    const c10::IValue own_target = stage == 1 ? part[1] : c10::IValue();
    const StepResult result = pipeline.step({part[0]}, {}, own_target, everywhere);
    double weight = 0;
    for (const double one : result.weights) weight += one;
    EXPECT_NEAR(result.loss(), expected_loss[rank / 2] / weight, 1e-6);
    for (std::size_t i = 0; i < 2; ++i) {
      const at::Tensor& expected = plain.stages[stage].parameters[i].second.grad();
      const at::Tensor& found = model.stages[stage].parameters[i].second.grad();
      EXPECT_LE((expected - found).abs().max().item<double>(), 1e-6) << "rank " << rank << ", parameter " << i;
    }
  });
}

TEST(LossWeight, IsGivenByAllProcessesOrByNone) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(2);
  on_threads(2, [&](int rank) {
    const Model model = perceptron(2);
    PipelineOptions options{.transport = c10d_transport(store, rank, 2), .loss = squared_error};
    if (rank == 1) options.loss_weight = count_rows();
    options.timeout = std::chrono::seconds(60);
    try {
      const Pipeline pipeline(model.build({rank}), generate("1F1B", {.ranks = 2, .microbatches = 2}), options);
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("whether there is a loss_weight should be the same in all processes."), std::string::npos)
        << error;
  }
}

TEST(LossWeight, IsAFiniteNumberOfAtLeastZero) {
  const Model model = perceptron(2);
  const auto error_with = [&](double weight) {
    PipelineOptions options{.loss = squared_error};
    options.loss_weight = [weight](const c10::IValue&, const Kwargs&) { return weight; };
    return message_of<PipelineError>(
        [&] { Schedule1F1B(model.build(), 2, options).step({rows(4, "x")}, {}, rows(4, "y")); });
  };
  EXPECT_EQ(error_with(-1),
            "the loss weight of microbatch 0 is -1.000000, expected a finite number of at least 0.\n  Hint: let "
            "PipelineOptions::loss_weight count the rows or targets that the loss is the mean of.");
  EXPECT_NE(error_with(std::numeric_limits<double>::infinity()).find("is inf, expected"), std::string::npos);
  PipelineOptions options{.loss = squared_error, .loss_weight = count_rows()};
  Schedule1F1B pipeline(model.build(), 2, options);
  try {
    pipeline.step({rows(4, "x")}, {}, at::Tensor());
    FAIL() << "no error";
  } catch (const PipelineError& error) {
    EXPECT_NE(std::string(error.what()).find("which has no rows or elements to count for its weight."),
              std::string::npos)
        << error.what();
  }
}

// Without a loss function, the loss terms of any process suffice; without terms, all processes throw.
TEST(LossTerms, AreEnoughForAStepBetweenProcesses) {
  for (const bool with_term : {true, false}) {
    SCOPED_TRACE(with_term);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> errors(2);
    on_threads(2, [&](int rank) {
      Model model = perceptron(2);
      model.stages[0].forward = [&, before = model.stages[0].forward](const Args& args,
                                                                      const Kwargs& kwargs) -> c10::IValue {
        const c10::IValue output = before(args, kwargs);
        if (with_term) add_loss(output.toTensor().square().mean());
        return output;
      };
      PipelineOptions options{.transport = c10d_transport(store, rank, 2)};
      options.timeout = std::chrono::seconds(60);
      Pipeline pipeline(model.build({rank}), generate("1F1B", {.ranks = 2, .microbatches = 2}), options);
      try {
        pipeline.step({rows(4, "x")});
        EXPECT_EQ(model.stages[0].parameters[0].second.grad().defined(), rank == 0);
      } catch (const PipelineError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error.rfind("the step has computed no gradients: ", 0) == 0, !with_term) << error;
    }
  }
}

// Without scale_grads the gradients are those of the sum over all rows.
TEST(LossWeight, IsNotDividedByTheTotalWithoutScaling) {
  const at::Tensor x = rows(5, "x");
  const at::Tensor y = rows(5, "y");
  const Model model = perceptron(2);
  WholeBatch whole = whole_batch(model, x, y, squared_error);
  Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error, .loss_weight = count_rows(), .scale_grads = false});
  pipeline.step({x}, {}, y);
  for (at::Tensor& gradient : whole.gradients) gradient = gradient * 5;
  expect_near(whole.gradients, gradients_of(model));
}

// StepOptions::weights are used as given; 0 leaves a microbatch out, whatever its loss would be.
TEST(LossWeight, OfZeroLeavesAMicrobatchOut) {
  const at::Tensor x = rows(4, "x");
  at::Tensor y = rows(4, "y");
  const Model model = perceptron(2);
  const WholeBatch first = whole_batch(model, x.narrow(0, 0, 2), y.narrow(0, 0, 2), squared_error);
  y[3][0] = std::numeric_limits<float>::quiet_NaN();
  Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error});
  StepOptions options;
  options.weights = {1, 0};
  pipeline.step({x}, {}, y, options);
  expect_near(first.gradients, gradients_of(model));
}

}  // namespace
}  // namespace penstock::internal::testing
