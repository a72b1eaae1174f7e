// Compares with torch.distributed.pipelining on the same models, which pipeline_reference.py has run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"
#include "tests/tensor/pickled.h"

namespace penstock::internal::testing {
namespace {

constexpr double kRate = 0.5;
constexpr double kTolerance = 1e-5;

using Record = c10::Dict<c10::IValue, c10::IValue>;

// A stage of pipeline_reference.py, with its weights.
StageModule stage_of(const std::string& model, const std::vector<at::Tensor>& weights, bool first, bool last) {
  const at::Tensor& w = weights[0];
  const at::Tensor& other = weights[1];
  if (model == "perceptron") {
    return {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
              return at::tanh(at::addmm(other, tensor(args, 0), w));
            },
            .parameters = {{"w", w}, {"b", other}}};
  }
  return {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
            const at::Tensor x = tensor(args, 0);
            const at::Tensor z = (first ? x : tensor(args, 1)) * other;
            const at::Tensor y = at::tanh(at::matmul(x, w) + z);
            if (last) return y + z;
            return c10::ivalue::Tuple::create({y, z});
          },
          .parameters = {{"w", w}, {"s", other}}};
}

// Merges the results of both ranks of one run.
struct ReferenceRun {
  ReferenceRun(const c10::IValue& rank0, const c10::IValue& rank1)
      : ranks({rank0.toGenericDict(), rank1.toGenericDict()}) {}

  c10::IValue at(const char* key) const { return ranks[0].at(key); }
  Record stage(int index) const {
    for (const Record& rank : ranks) {
      const auto stages = rank.at("stages").toGenericDict();
      const auto found = stages.find(std::to_string(index));
      if (found != stages.end()) return found->value().toGenericDict();
    }
    throw std::runtime_error("no rank has stage " + std::to_string(index));
  }
  std::vector<c10::IValue> losses() const {
    const std::vector<c10::IValue> own = items(ranks[0].at("losses"));
    return own.empty() ? items(ranks[1].at("losses")) : own;
  }

  std::array<Record, 2> ranks;
};

void expect_near(const at::Tensor& expected, const at::Tensor& found, const std::string& where) {
  ASSERT_TRUE(found.defined()) << where;
  const auto worst = (expected - found.cpu()).abs().max().item<double>();
  EXPECT_LE(worst, kTolerance * std::max(1.0, expected.abs().max().item<double>()))
      << where << "\nthe reference's " << expected << "\nours " << found;
}

void expect_same_training(const ReferenceRun& reference) {
  const Schedule schedule =
      generate(reference.at("schedule").toStringRef(),
               {.ranks = 2, .microbatches = static_cast<int>(reference.at("microbatches").toInt())});
  std::vector<std::vector<at::Tensor>> weights;
  std::vector<PipelineStage> stages;
  for (int index = 0; index < schedule.stages(); ++index) {
    auto& own = weights.emplace_back();
    for (const c10::IValue& one : items(reference.stage(index).at("weights"))) {
      own.push_back(one.toTensor().clone().to(test_device(index)).requires_grad_());
    }
    stages.emplace_back(stage_of(reference.at("model").toStringRef(), own, index == 0, index == schedule.stages() - 1),
                        index, schedule.stages(), StageOptions{.device = test_device(index)});
  }
  Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
  const std::vector<c10::IValue> losses = reference.losses();
  for (std::size_t step = 0; step < losses.size(); ++step) {
    const StepResult result = pipeline.step({reference.at("x")}, {}, reference.at("y"));
    const std::vector<c10::IValue> expected = items(losses[step]);
    ASSERT_EQ(expected.size(), result.losses.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expect_near(expected[i].toTensor(), result.losses[i], "step " + std::to_string(step) + ", a loss");
    }
    for (int index = 0; index < schedule.stages(); ++index) {
      const std::vector<c10::IValue> gradients = items(items(reference.stage(index).at("gradients")).at(step));
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const at::Tensor& parameter = weights[static_cast<std::size_t>(index)][i];
        expect_near(gradients[i].toTensor(), parameter.grad(),
                    "step " + std::to_string(step) + ", stage " + std::to_string(index));
        const at::NoGradGuard no_grad;
        parameter.sub_(parameter.grad() * kRate);
        parameter.mutable_grad().reset();
      }
    }
  }
}

TEST(PipelineReference, HasTheSameLossesAndGradientsOverFiveOptimizerSteps) {
  const std::vector<c10::IValue> rank0 = read_pickled("PENSTOCK_PIPELINES", "rank0.pt");
  const std::vector<c10::IValue> rank1 = read_pickled("PENSTOCK_PIPELINES", "rank1.pt");
  ASSERT_EQ(rank0.size(), rank1.size());
  ASSERT_GE(rank0.size(), 28U);
  for (std::size_t i = 0; i < rank0.size(); ++i) {
    const ReferenceRun reference(rank0[i], rank1[i]);
    SCOPED_TRACE(reference.at("schedule").toStringRef() + ", " + reference.at("model").toStringRef() + ", " +
                 std::to_string(reference.at("microbatches").toInt()) + " microbatches");
    expect_same_training(reference);
    if (HasFailure()) return;
  }
  std::cout << rank0.size() << " trainings agree\n";
}

}  // namespace
}  // namespace penstock::internal::testing
