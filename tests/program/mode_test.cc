// Training, evaluation and autocast.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/inputs.h"
#include "penstock/program/interpreter/operators.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/safetensors.h"
#include "tests/program/programs.h"
#include "tests/program/tensor_bytes.h"
#include "tests/program/zoo.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

class Modes : public ::testing::TestWithParam<std::string> {};

TEST_P(Modes, ComputeInEvaluationWhatEagerPyTorchDoes) {
  Program program = exported(GetParam());
  EXPECT_TRUE(program.is_training());
  program.eval();
  EXPECT_FALSE(program.is_training());
  const std::map<std::string, at::Tensor> expected = expected_of(GetParam());
  const at::Tensor output = program.run({expected.at("input.0")}).toTensor();
  EXPECT_TRUE(at::allclose(expected.at("output.0"), output, 1e-5, 1e-6));
  output.sum().backward();
  for (const auto& [name, parameter] : program.parameters()) {
    ASSERT_TRUE(parameter.grad().defined()) << name;
    EXPECT_TRUE(at::allclose(expected.at("grad." + name), parameter.grad(), 1e-4, 1e-5)) << name;
  }
}

TEST_P(Modes, DrawInTrainingAloneAndComeBack) {
  Program program = exported(GetParam());
  const at::Tensor x = expected_of(GetParam()).at("input.0");
  const auto run = [&](std::uint64_t seed) {
    const RandomScope scope(seed, 0, 0, 0);
    return program.run({x}).toTensor().detach();
  };
  const at::Tensor trained = run(1);
  EXPECT_FALSE(same_bits(trained, run(2)));
  program.eval();
  EXPECT_TRUE(same_bits(run(1), run(2)));
  EXPECT_FALSE(same_bits(trained, run(1)));
  program.train();
  EXPECT_TRUE(program.is_training());
  EXPECT_TRUE(same_bits(trained, run(1)));
}

TEST_P(Modes, DrawNothingFromTheProcessInEvaluation) {
  Program program = exported(GetParam());
  program.eval();
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = generator.get_state();
  program.run({expected_of(GetParam()).at("input.0")});
  EXPECT_TRUE(at::equal(before, generator.get_state()));
  program.train();
  program.run({expected_of(GetParam()).at("input.0")});
  EXPECT_FALSE(at::equal(before, generator.get_state()));
}

INSTANTIATE_TEST_SUITE_P(All, Modes,
                         ::testing::Values("dropouts", "attention", "recurrent", "norms", "attention_functional",
                                           "recurrent_functional"),
                         [](const auto& one) { return one.param; });

// After run_decompositions(), dropout has no training flag.
TEST(Mode, OfEvaluationIsRefusedWhereItIsNot) {
  Program program = exported("dropouts_functional");
  expect_refused(
      [&] { program.eval(); },
      program.name() +
          ": was exported in training mode, and has no flag left for what evaluation leaves out:\n"
          "  node 'bernoulli' (torch.ops.aten.bernoulli.p) of module 'blocks.0' (__main__.Dropouts.Block)\n");
  EXPECT_TRUE(program.is_training());
}

// Normalisations without running statistics use those of the batch in both modes. A wrong flag would crash libtorch.
TEST(Mode, OfEvaluationDoesNotEndTheProcessForNormsWithoutStatistics) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    Program program = exported("norms_functional");
    const std::map<std::string, at::Tensor> expected = expected_of("norms_functional");
    program.eval();
    const at::Tensor output = program.run({expected.at("input.0")}).toTensor();
    std::exit(at::allclose(expected.at("output.0"), output, 1e-5, 1e-6) ? 0 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

TEST(Mode, OfEvaluationLeavesStatisticsAsTheyAre) {
  Program program = exported("norms");
  const at::Tensor x = expected_of("norms").at("input.0");
  const NamedTensors before = copies(program.buffers());
  program.eval();
  program.run({x});
  expect_equal(before, program.buffers());
  program.train();
  program.run({x});
  program.run({x});
  for (const auto& [name, buffer] : program.buffers()) {
    const at::Tensor was = by_name(before).at(name);
    if (name.ends_with("num_batches_tracked")) {
      EXPECT_EQ(buffer.item<std::int64_t>(), was.item<std::int64_t>() + 2) << name;
    } else {
      EXPECT_FALSE(at::equal(was, buffer)) << name;
    }
  }
}

// In a functionalised program, running statistics are outputs.
TEST(Mode, OfEvaluationLeavesStatisticsAsTheyAreWhereTheyAreOutputs) {
  const ZooModel model = zoo_model("functionalized");
  Program program(model.path(".pt2"));
  const std::vector<Arguments> microbatches = microbatches_of(model, program);
  const NamedTensors before = copies(program.buffers());
  ASSERT_FALSE(before.empty());
  program.eval();
  program.run(microbatches[0].args, microbatches[0].kwargs);
  expect_equal(before, program.buffers());
  program.train();
  program.run(microbatches[0].args, microbatches[0].kwargs);
  for (const auto& [name, buffer] : program.buffers())
    EXPECT_FALSE(at::equal(by_name(before).at(name), buffer)) << name;
}

TEST(Mode, OfTrainingIsLostInAnExportOfEvaluation) {
  Program program = exported("norms_in_evaluation");
  EXPECT_FALSE(program.is_training());
  expect_error<ProgramError>(
      [&] { program.train(); },
      program_path("norms_in_evaluation.pt2") +
          ": was exported in evaluation mode, and has lost what training needs:"
          "\n  node 'batch_norm' (torch.ops.aten.batch_norm.default) of module 'layers.1' "
          "(torch.nn.modules.batchnorm.BatchNorm1d)"
          "\n  node 'dropout' (torch.ops.aten.dropout.default) of module 'layers.2' (torch.nn.modules.dropout.Dropout)"
          "\n  node 'batch_norm_1' (torch.ops.aten.batch_norm.default) of module 'layers.4' "
          "(torch.nn.modules.batchnorm.BatchNorm1d)"
          "\n  and 1 more"
          "\n  Hint: call model.train() before torch.export.export.");
  EXPECT_FALSE(program.is_training());
  EXPECT_NO_THROW(program.eval());
  EXPECT_NO_THROW(program.run({at::ones({6, 8})}));
}

TEST(Mode, MayBeEitherOfAProgramInWhichNothingDiffers) {
  Program program = exported("pair");
  EXPECT_TRUE(program.is_training());
  const at::Tensor trained = program.run({at::ones({3, 4})}).toTensor();
  program.eval();
  EXPECT_TRUE(same_bits(trained, program.run({at::ones({3, 4})}).toTensor()));
  EXPECT_NO_THROW(program.train());
}

TEST(Mode, IsOneForAllCopiesAndTheirStages) {
  Program program = exported("dropouts");
  const Program copy = program;
  const Pipe pipe = pipeline(program, 2);
  program.eval();
  EXPECT_FALSE(copy.is_training());
  const at::Tensor x = expected_of("dropouts").at("input.0");
  EXPECT_TRUE(same_bits(pipe.run({x}).toTensor(), pipe.run({x}).toTensor()));
}

// Returns the largest difference, relative to the largest element.
double difference_of(const at::Tensor& expected, const at::Tensor& found) {
  const at::Tensor wide = expected.to(at::kDouble);
  return ((wide - found.to(at::kDouble)).abs().max() / wide.abs().max()).item<double>();
}

TEST(Autocast, ComputesAsEagerPyTorchDoes) {
  Program program = exported("mixed");
  program.set_autocast(at::kBFloat16);
  const std::map<std::string, at::Tensor> expected = expected_of("mixed");
  const auto outputs = program.run({expected.at("input.0")}).toTupleRef().elements().vec();
  at::Tensor sum = at::zeros({});
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& right = expected.at("output." + std::to_string(i));
    EXPECT_EQ(outputs[i].toTensor().scalar_type(), right.scalar_type()) << i;
    EXPECT_LE(difference_of(right, outputs[i].toTensor()), 2e-2) << i;
    sum = sum + outputs[i].toTensor().to(at::kFloat).sum();
  }
  sum.backward();
  for (const auto& [name, parameter] : program.parameters()) {
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    EXPECT_LE(difference_of(expected.at("grad." + name), parameter.grad()), 2e-2) << name;
  }
}

TEST(Autocast, IsOfTheProgramAndNotOfTheThread) {
  Program program = exported("mixed");
  const at::Tensor x = expected_of("mixed").at("input.0");
  const auto logits = [&] { return program.run({x}).toTupleRef().elements()[1].toTensor(); };
  const at::Tensor plain = logits();
  program.set_autocast(at::kBFloat16);
  EXPECT_EQ(logits().scalar_type(), at::kBFloat16);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_ANY_THROW(program.run({at::ones({1})}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  program.set_autocast(std::nullopt);
  EXPECT_TRUE(same_bits(plain, logits()));
}

TEST(Autocast, SeesAWeightThatHasChanged) {
  Program program = exported("mixed");
  program.set_autocast(at::kBFloat16);
  const at::Tensor x = expected_of("mixed").at("input.0");
  const at::Tensor before = program.run({x}).toTupleRef().elements()[1].toTensor();
  NamedTensors zeros = copies(program.state_dict());
  for (auto& [name, tensor] : zeros) tensor.zero_();
  program.load_state_dict(zeros);
  const at::Tensor after = program.run({x}).toTupleRef().elements()[1].toTensor();
  EXPECT_TRUE(before.abs().sum().item<double>() > 0);
  EXPECT_EQ(after.abs().sum().item<double>(), 0);
}

TEST(Autocast, OfTheModelsOwnHoldsInside) {
  const ZooModel model = zoo_model("autocast");
  Program program = model.program();
  const std::vector<Arguments> microbatches = microbatches_of(model, program);
  const c10::IValue before = program.run(microbatches[0].args, microbatches[0].kwargs);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(same(before, program.run(microbatches[0].args, microbatches[0].kwargs)));
}

}  // namespace
}  // namespace penstock::internal::testing
