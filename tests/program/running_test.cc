// A program that runs: what it takes, what it has, its modes, and how it fails.
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
#include "penstock/program/operators.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/safetensors.h"
#include "tests/program/programs.h"
#include "tests/program/tensor_bytes.h"
#include "tests/program/zoo.h"
#include "tests/tensor/values.h"

namespace penstock::testing {
namespace {

std::map<std::string, at::Tensor> by_name(const NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

std::set<std::string> names_in(const NamedTensors& tensors) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) names.insert(name);
  return names;
}

NamedTensors copies(const NamedTensors& tensors) {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) result.emplace_back(name, tensor.detach().clone());
  return result;
}

void expect_equal(const NamedTensors& expected, const NamedTensors& found) {
  ASSERT_EQ(names_in(expected), names_in(found));
  const std::map<std::string, at::Tensor> of_found = by_name(found);
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(same(tensor.detach(), of_found.at(name).detach())) << name;
  }
}

// The arguments of the program "inputs".
class Inputs : public ::testing::Test {
 protected:
  const Program program = exported("inputs");
  Args args{at::ones({4, 5, 6}), list({at::ones({4, 6})}), 3};
  Kwargs kwargs{{"mask", at::ones({5, 5}, at::kBool)}, {"scale", 2}, {"how", "sum"}, {"more", c10::IValue()}};

  void expect_error(const std::string& message) {
    testing::expect_error<ProgramError>([&] { program.run(args, kwargs); }, message);
  }
  // The symbol of a dimension of an input.
  std::string symbol(std::size_t input, std::size_t dimension) const {
    std::size_t user = 0;
    for (const ProgramInput& one : program.inputs()) {
      if (one.kind != ProgramInput::Kind::User || user++ != input) continue;
      return program.graph().values[static_cast<std::size_t>(one.value)].type->sizes[dimension].symbol;
    }
    return "";
  }
};

TEST_F(Inputs, MayHaveAnySizeThatTheExportLeftOpen) {
  for (const std::int64_t batch : {2, 4, 8}) {
    for (const std::int64_t time : {3, 9}) {
      args[0] = at::ones({batch, time, 6});
      args[1] = list({at::ones({batch, 6})});
      kwargs["mask"] = at::ones({time, time}, at::kBool);
      const auto output = program.run(args, kwargs).toGenericDict();
      EXPECT_EQ(output.at("out").toTensor().sizes(), (std::vector<std::int64_t>{batch, 6}));
      EXPECT_EQ(output.at("rows").toInt(), batch);
    }
  }
}

TEST_F(Inputs, AreCounted) {
  args.pop_back();
  expect_error("found 2 arguments, expected 3.");
  args.resize(4);
  expect_error("found 4 arguments, expected 3.");
}

TEST_F(Inputs, HaveTheNamesOfTheExport) {
  kwargs.emplace("masks", at::ones({5, 5}));
  expect_error("there is no keyword argument 'masks'.");
}

TEST_F(Inputs, AreMissedByName) {
  kwargs.erase("mask");
  EXPECT_NO_FATAL_FAILURE(
      expect_refused([&] { program.run(args, kwargs); }, "kwargs.mask: found None, expected bool["));
}

TEST_F(Inputs, HaveTheStructureOfTheExport) {
  args[1] = at::ones({4, 6});
  expect_error("args.1: found float32 tensor of shape [4, 6], expected list of 1.");
  args[1] = list({at::ones({4, 6}), at::ones({4, 6})});
  expect_error("args.1: found list of 2, expected list of 1.");
  args[1] = list({5});
  expect_error("args.1.0: found int 5, expected float32[" + symbol(1, 0) + ", 6].");
}

TEST_F(Inputs, HaveTheDtypeOfTheExport) {
  args[0] = at::ones({4, 5, 6}, at::kDouble);
  expect_error("args.0: found dtype float64, expected float32.");
}

TEST_F(Inputs, HaveTheRankOfTheExport) {
  args[0] = at::ones({4, 5});
  expect_error("args.0: found shape [4, 5], expected float32[" + symbol(0, 0) + ", " + symbol(0, 1) + ", 6].");
}

TEST_F(Inputs, HaveTheSizesThatTheExportFixed) {
  args[0] = at::ones({4, 5, 7});
  expect_error(
      "args.0, dimension 2: found 7, expected 6, which is fixed.\n  Hint: torch.export.export(…, dynamic_shapes=…) "
      "leaves it open.");
}

TEST_F(Inputs, StayInTheRangesOfTheExport) {
  args[0] = at::ones({4, 10, 6});
  expect_error("args.0, dimension 1: found 10, expected 3 to 9 (" + symbol(0, 1) + ").");
  args[0] = at::ones({4, 2, 6});
  expect_error("args.0, dimension 1: found 2, expected 3 to 9 (" + symbol(0, 1) + ").");
  args[0] = at::ones({1, 5, 6});
  expect_error("args.0, dimension 0: found 1, expected 2 to 8 (" + symbol(0, 0) + ").");
}

TEST_F(Inputs, AgreeWhereTheExportHasOneSizeForTwo) {
  args[1] = list({at::ones({3, 6})});
  expect_error("args.1.0, dimension 0: found 3, expected 4, as in args.0, dimension 0 (both are " + symbol(0, 0) +
               ").");
  args[1] = list({at::ones({4, 6})});
  kwargs["mask"] = at::ones({5, 6}, at::kBool);
  expect_error("kwargs.mask, dimension 1: found 6, expected 5, as in args.0, dimension 1 (both are " + symbol(0, 1) +
               ").");
}

TEST_F(Inputs, AreTheNumbersThatTheExportTookForGood) {
  args[2] = 4;
  expect_error("args.2: found int 4, and the program was exported for int 3 alone.");
  args[2] = 3.5;
  expect_error("args.2: found float 3.5, and the program was exported for int 3 alone.");
  args[2] = 3;
  kwargs["how"] = "mean";
  expect_error("kwargs.how: found str 'mean', and the program was exported for str 'sum' alone.");
  kwargs["how"] = "sum";
  kwargs["more"] = at::ones({1});
  expect_error("kwargs.more: found float32 tensor of shape [1], and the program was exported for None alone.");
  // Who leaves them out means them.
  kwargs.erase("more");
  kwargs.erase("how");
  kwargs["scale"] = c10::IValue();
  EXPECT_NO_THROW(program.run(args, kwargs));
}

TEST_F(Inputs, AreNotChanged) {
  const c10::IValue before = list({at::ones({4, 5, 6}), at::ones({4, 6})});
  program.run(args, kwargs);
  EXPECT_TRUE(same(before, list({args[0], args[1].toListRef()[0]})));
}

TEST(Run, WantsSizesThatAreMultiplesOfOthersAsTheExportHasThem) {
  const Program program = exported("derived");
  EXPECT_NO_THROW(program.run({at::ones({4, 3}), at::ones({8, 3})}));
  // The same code would run: seven rows are four of every second.
  expect_refused([&] { program.run({at::ones({4, 3}), at::ones({7, 3})}); },
                 "args.1, dimension 0: found 7, expected 8");
}

TEST(Run, GivesBackWhatItWasGivenWhereItComputesNothing) {
  const Program program = exported("identity");
  EXPECT_TRUE(program.graph().nodes.empty());
  const at::Tensor x = counting({3, 4});
  EXPECT_TRUE(same(x, program.run({x})));
}

TEST(Run, NamesTheNodeAndTheModuleThatFailed) {
  const Program program = exported("tied");
  const at::Tensor ids = at::full({2, 3}, 99, at::kLong);
  expect_error<ProgramError>([&] { program.run({ids}); },
                             "node 'embedding' (torch.ops.aten.embedding.default) of module 'embedding' "
                             "(torch.nn.modules.sparse.Embedding): index out of range in self");
  // Nothing of it stays.
  EXPECT_TRUE(c10::GradMode::is_enabled());
  EXPECT_NO_THROW(program.run({at::zeros({2, 3}, at::kLong)}));
}

TEST(Run, LetsGoOfEachValueAfterItsLastUse) {
  const Program program = exported("chain");
  const c10::NoGradGuard no_grad;
  const at::Tensor x = at::ones({512, 512});
  constexpr std::int64_t kMegabyte = 1 << 20;
  const TensorBytes bytes;
  const c10::IValue output = program.run({x});
  // An operand, a result, and what is made of half of it; of 24 values and 8 that nobody uses.
  EXPECT_LE(bytes.most(), 2 * kMegabyte + kMegabyte / 2 + 4096);
  EXPECT_GE(bytes.most(), 2 * kMegabyte);
  EXPECT_EQ(bytes.now(), kMegabyte);
}

TEST(Run, IsTheSameOnManyThreadsAtOnce) {
  Program program = exported("dropouts");
  const c10::IValue x = expected_of("dropouts").at("input.0");
  const auto run = [&] {
    const RandomScope scope(/*seed=*/1, /*step=*/2, /*microbatch=*/3, /*place=*/0);
    at::set_num_threads(1);
    return program.run({x});
  };
  const c10::IValue expected = run();
  std::vector<std::thread> threads;
  std::vector<c10::IValue> found(4);
  threads.reserve(found.size());
  for (c10::IValue& one : found) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) one = run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const c10::IValue& one : found) EXPECT_TRUE(same(expected.toTensor().detach(), one.toTensor().detach()));
}

TEST(Run, DrawsOtherNumbersAtOtherPlaces) {
  const Program program = exported("dropouts");
  const c10::IValue x = expected_of("dropouts").at("input.0");
  const auto run = [&](std::uint64_t seed, std::int64_t step, std::int64_t microbatch) {
    const RandomScope scope(seed, step, microbatch, /*place=*/0);
    return program.run({x}).toTensor();
  };
  const at::Tensor first = run(1, 1, 1);
  EXPECT_TRUE(same_bits(first, run(1, 1, 1)));
  EXPECT_FALSE(same_bits(first, run(2, 1, 1)));
  EXPECT_FALSE(same_bits(first, run(1, 2, 1)));
  EXPECT_FALSE(same_bits(first, run(1, 1, 2)));
}

TEST(Weights, ThatAreOneTensorAreOne) {
  const Program program = exported("tied");
  const std::map<std::string, at::Tensor> parameters = by_name(program.parameters());
  EXPECT_TRUE(parameters.at("embedding.weight").is_same(parameters.at("head.weight")));
  program.run({at::zeros({2, 3}, at::kLong)}).toTensor().sum().backward();
  const std::map<std::string, at::Tensor> expected = expected_of("tied");
  EXPECT_TRUE(at::allclose(expected.at("grad.embedding.weight"), parameters.at("head.weight").grad()));
  EXPECT_FALSE(parameters.at("frozen.weight").requires_grad());
  EXPECT_FALSE(parameters.at("frozen.weight").grad().defined());
}

TEST(Weights, HaveTheNamesAndNumbersOfTheModelsStateDict) {
  for (const std::string name : {"tied", "norms", "dropouts", "recurrent"}) {
    SCOPED_TRACE(name);
    NamedTensors expected;
    for (const auto& [key, tensor] : expected_of(name)) {
      if (key.starts_with("state.")) expected.emplace_back(key.substr(6), tensor);
    }
    expect_equal(expected, exported(name).state_dict());
  }
}

TEST(Weights, ThatAStateDictDoesNotHaveAreBuffersAllTheSame) {
  const Program program = exported("tied");
  EXPECT_EQ(names_in(program.buffers()), (std::set<std::string>{"scale.factor", "scale.shift"}));
  EXPECT_FALSE(names_in(program.state_dict()).contains("scale.shift"));
  EXPECT_TRUE(names_in(program.state_dict()).contains("scale.factor"));
}

TEST(Weights, AreLoadedAndUsed) {
  Program program = exported("tied");
  const Program copy = program;
  const at::Tensor ids = counting({2, 3}, at::kLong);
  const at::Tensor before = program.run({ids}).toTensor();
  NamedTensors state = copies(program.state_dict());
  for (auto& [name, tensor] : state) tensor.mul_(2);
  program.load_state_dict(state);
  expect_equal(state, program.state_dict());
  EXPECT_FALSE(at::equal(before, program.run({ids}).toTensor()));
  // Copies are the same program; another one is not.
  EXPECT_TRUE(at::equal(program.run({ids}).toTensor(), copy.run({ids}).toTensor()));
  EXPECT_TRUE(at::equal(before, exported("tied").run({ids}).toTensor()));
  // They are the same tensors as before, with the same gradients.
  EXPECT_TRUE(by_name(program.parameters()).at("head.weight").is_leaf());
  EXPECT_TRUE(by_name(program.parameters()).at("head.weight").requires_grad());
}

TEST(Weights, AreLeftAsTheyAreWhenOneCannotBeLoaded) {
  Program program = exported("tied");
  const NamedTensors before = copies(program.state_dict());
  const auto refused = [&](const std::function<void(NamedTensors&)>& change, const std::string& message) {
    NamedTensors state = copies(before);
    for (auto& [name, tensor] : state) tensor.add_(1);
    change(state);
    expect_error<ProgramError>([&] { program.load_state_dict(state); }, message);
    expect_equal(before, program.state_dict());
  };
  refused([](NamedTensors& state) { state.emplace_back("tail.weight", at::ones({1})); },
          "the program has no parameter or buffer 'tail.weight'.");
  refused([](NamedTensors& state) { state.emplace_back("scale.shift", at::ones({1})); },
          "the program has no parameter or buffer 'scale.shift'.");
  refused([](NamedTensors& state) { state.back().second = at::ones({2, 2}); },
          "'" + before.back().first + "': found shape [2, 2], expected [1].");
  refused([](NamedTensors& state) { state.erase(state.begin()); }, "'" + before.front().first + "' is missing.");
}

TEST(Weights, ComeBackFromAFile) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "penstock-running-test.safetensors";
  for (const std::string name : {"tied", "norms"}) {
    const Program program = exported(name);
    const NamedTensors state = copies(program.state_dict());
    write_safetensors(path.string(), program.state_dict());
    Program other = exported(name);
    NamedTensors zeros = copies(state);
    for (auto& [key, tensor] : zeros) tensor.zero_();
    other.load_state_dict(zeros);
    other.load_state_dict(read_safetensors(path.string()));
    expect_equal(state, other.state_dict());
  }
  std::filesystem::remove(path);
}

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

// An export that has taken operators apart has no flag left in some of them.
TEST(Mode, OfEvaluationIsRefusedWhereItIsNot) {
  Program program = exported("dropouts_functional");
  const std::map<std::string, at::Tensor> expected = expected_of("dropouts_functional");
  try {
    program.eval();
    const at::Tensor output = program.run({expected.at("input.0")}).toTensor();
    EXPECT_TRUE(at::allclose(expected.at("output.0"), output, 1e-5, 1e-6));
  } catch (const ProgramError& error) {
    EXPECT_NE(std::string(error.what()).find("(torch.ops.aten.bernoulli.p) of module 'blocks.0'"), std::string::npos)
        << error.what();
  }
}

// Of the batch alone, in both modes; by itself, since libtorch does not survive a wrong flag there.
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

// Of a program in which nothing is written in place, statistics are outputs.
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

// As a part of the largest number.
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

// All of them, in one to four stages, on numbers made up for them.
TEST(Stages, GiveInARowWhatTheProgramGives) {
  for (const std::string name :
       {"pair", "tied", "dropouts", "attention", "recurrent", "norms", "mixed", "leading_marks", "counted", "averaged",
        "length", "masked", "indices", "identity", "arithmetic"}) {
    SCOPED_TRACE(name);
    for (int stages = 1; stages <= 4; ++stages) {
      SCOPED_TRACE(stages);
      const Program one = exported(name);
      const Program other = exported(name);
      const Arguments arguments = arguments_from(one, example_inputs(one, 1, 5));
      std::vector<int> cut;
      try {
        cut = split_evenly(other, stages, estimated_costs(other));
      } catch (const ProgramError&) {
        EXPECT_GT(stages, 1);
        continue;
      }
      const Pipe pipe(other, cut);
      // Twice, so that statistics are seen.
      for (int step = 0; step < 2; ++step) {
        const RandomScope scope(/*seed=*/3, step, /*microbatch=*/0, /*place=*/0);
        EXPECT_TRUE(same(one.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
      }
    }
  }
}

// What nobody writes to need not be copied for the stages that use it.
TEST(Stages, HaveTheProgramsOwnBuffers) {
  Program program = exported("masked");
  const Pipe pipe = pipeline(program, 3);
  NamedTensors state = copies(program.state_dict());
  for (auto& [name, tensor] : state) {
    if (name == "rows") tensor.fill_(2);
  }
  program.load_state_dict(state);
  const at::Tensor x = counting({2, 5, 4}).div(40);
  EXPECT_TRUE(same(program.run({x}), pipe.run({x})));
}

TEST(Examples, AreGoodForTheProgram) {
  const Program program = exported("tied");
  const TensorsByName inputs = example_inputs(program, 50, 1);
  const at::Tensor& ids = inputs.at("args.0");
  EXPECT_EQ(ids.sizes(), (std::vector<std::int64_t>{100, 3}));
  EXPECT_GE(ids.min().item<std::int64_t>(), 0);
  EXPECT_EQ(ids.max().item<std::int64_t>(), 7);
  EXPECT_TRUE(at::equal(ids, example_inputs(program, 50, 1).at("args.0")));
  EXPECT_FALSE(at::equal(ids, example_inputs(program, 50, 2).at("args.0")));
  // Microbatches are the same however many there are.
  EXPECT_TRUE(at::equal(ids.narrow(0, 0, 4), example_inputs(program, 2, 1).at("args.0")));
}

TEST(Examples, AreKnownByTheirNames) {
  const Program program = exported("inputs");
  TensorsByName inputs = example_inputs(program, 1, 1);
  EXPECT_EQ(inputs.size(), 3U);
  const Arguments arguments = arguments_from(program, inputs);
  EXPECT_NO_THROW(program.run(arguments.args, arguments.kwargs));
  EXPECT_EQ(arguments.args[2].toInt(), 3);
  inputs.emplace("args.7", at::ones({1}));
  expect_error<ProgramError>([&] { arguments_from(program, inputs); },
                             "there is no input 'args.7'; the program takes args.0, args.1.0, kwargs.mask.");
  inputs.erase("args.7");
  inputs.erase("kwargs.mask");
  expect_error<ProgramError>([&] { arguments_from(program, inputs); }, "the input 'kwargs.mask' is missing.");
}

TEST(Examples, AreSharedOutAmongMicrobatches) {
  const Program program = exported("pair");
  const std::vector<TensorsByName> parts = split_inputs(program, {{"args.0", counting({6, 4})}}, 2);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_TRUE(same(counting({6, 4}).narrow(0, 3, 3), parts[1].at("args.0")));
  expect_error<ProgramError>([&] { split_inputs(program, {{"args.0", at::ones({7, 4})}}, 2); },
                             "args.0: has 7 rows, which cannot be shared out among 2 microbatches.");
  expect_error<ProgramError>([&] { split_inputs(program, {{"args.0", at::ones({})}}, 2); },
                             "args.0: has no rows, which cannot be shared out among 2 microbatches.");
}

TEST(Costs, AreMeasuredWithoutTouchingTheProgram) {
  const Program program = exported("norms");
  const NamedTensors before = copies(program.state_dict());
  const at::Tensor drawn = at::detail::getDefaultCPUGenerator().get_state();
  const std::vector<NodeCost> costs = measured_costs(program, {expected_of("norms").at("input.0")});
  ASSERT_EQ(costs.size(), program.graph().nodes.size());
  for (const NodeCost& cost : costs) EXPECT_GT(cost.seconds, 0);
  expect_equal(before, program.state_dict());
  EXPECT_TRUE(at::equal(drawn, at::detail::getDefaultCPUGenerator().get_state()));
  for (const auto& [name, parameter] : program.parameters()) EXPECT_FALSE(parameter.grad().defined()) << name;
}

TEST(Arithmetic, OfAProgramIsPythons) {
  const Program program = exported("arithmetic");
  const std::map<std::string, at::Tensor> expected = expected_of("arithmetic");
  const at::Tensor& sizes = expected.at("sizes");
  for (std::int64_t row = 0; row < sizes.numel(); ++row) {
    const auto outputs = program.run({at::ones({sizes[row].item<std::int64_t>(), 2})}).toTupleRef().elements().vec();
    ASSERT_EQ(outputs.size(), expected.size());
    for (std::size_t i = 1; i < outputs.size(); ++i) {
      const double right = expected.at("output." + std::to_string(i))[row].item<double>();
      EXPECT_EQ(outputs[i].toScalar().toDouble(), right) << "output " << i << " of size " << sizes[row].item();
    }
  }
}

c10::IValue computed(const std::string& target, const std::vector<c10::IValue>& operands) {
  const auto function = find_function(target);
  if (!function) throw std::logic_error(target);
  return std::get<Arithmetic>(*function)(operands);
}

struct Sum {
  std::string target;
  std::vector<c10::IValue> operands;
  c10::IValue result;
};

void PrintTo(const Sum& sum, std::ostream* out) {
  *out << sum.target;
  for (const c10::IValue& operand : sum.operands) *out << " " << text(operand);
}

void expect_sum(const Sum& sum) {
  try {
    EXPECT_TRUE(same(sum.result, computed(sum.target, sum.operands))) << ::testing::PrintToString(sum);
  } catch (const ProgramError& error) {
    ADD_FAILURE() << ::testing::PrintToString(sum) << ": " << error.what();
  }
}

TEST(Arithmetic, IsPythonsOfNegativeNumbersToo) {
  // As `python3 -c 'print(…)'` has them.
  const std::vector<Sum> sums = {
      {"_operator.floordiv", {-7, 2}, -4},
      {"_operator.floordiv", {7, -2}, -4},
      {"_operator.floordiv", {-7, -2}, 3},
      {"_operator.floordiv", {-8, 2}, -4},
      {"_operator.floordiv", {-7.5, 2}, -4.0},
      {"_operator.mod", {-7, 3}, 2},
      {"_operator.mod", {7, -3}, -2},
      {"_operator.mod", {-7, -3}, -1},
      {"_operator.mod", {INT64_MIN, -1}, 0},
      {"_operator.mod", {-7.5, 2}, 0.5},
      {"_operator.mod", {7.5, -2}, -0.5},
      {"_operator.pow", {-2, 3}, -8},
      {"_operator.pow", {-2, 2}, 4},
      {"_operator.pow", {-2, 0}, 1},
      {"_operator.pow", {-2, -1}, -0.5},
      {"_operator.pow", {-2, -2}, 0.25},
      {"_operator.pow", {-2, 63}, INT64_MIN},
      {"_operator.pow", {-1, 1'000'000'001}, -1},
      {"_operator.pow", {0, 0}, 1},
      {"_operator.pow", {2.0, -1}, 0.5},
      {"_operator.truediv", {-7, 2}, -3.5},
      {"_operator.neg", {-7}, 7},
      {"builtins.abs", {-7}, 7},
      {"builtins.abs", {-7.5}, 7.5},
      {"_operator.invert", {-7}, 6},
      {"_operator.and_", {-7, 5}, 1},
      {"_operator.or_", {-8, 5}, -3},
      {"_operator.xor", {-7, 5}, -4},
      {"_operator.lshift", {-3, 2}, -12},
      {"_operator.rshift", {-3, 1}, -2},
      {"math.ceil", {-1.5}, -1},
      {"math.floor", {-1.5}, -2},
      {"math.trunc", {-1.5}, -1},
      {"builtins.int", {-1.5}, -1},
      {"builtins.round", {-1.5}, -2},
      {"builtins.round", {-2.5}, -2},
      {"builtins.round", {0.5}, 0},
      {"builtins.max", {-1, -2}, -1},
      {"builtins.min", {-1, -2.0}, -2.0},
      {"torch.sym_max", {-1, -1.0}, -1},
      {"builtins.bool", {-1}, true},
      {"torch.sym_ite", {false, 1, -1}, -1},
      {"torch.sym_sum", {-1, -2, 4}, 1},
      {"_operator.lt", {-2, -1}, true},
      {"_operator.eq", {-1, -1.0}, true},
  };
  for (const Sum& sum : sums) expect_sum(sum);
}

TEST(Arithmetic, IsPythonsAtItsEdgesToo) {
  expect_sum({"_operator.floordiv", {1.0, 0.1}, 9.0});
  expect_sum({"_operator.rshift", {-3, 64}, -1});
  expect_sum({"_operator.rshift", {3, 100}, 0});
  expect_sum({"_operator.eq", {(std::int64_t{1} << 53) + 1, 0x1p53}, false});
  for (const Sum& refused : {Sum{"_operator.pow", {0, -1}, {}}, Sum{"_operator.pow", {0.0, -1.0}, {}},
                             Sum{"_operator.lshift", {1, -1}, {}}, Sum{"_operator.rshift", {8, -1}, {}}}) {
    EXPECT_THROW(computed(refused.target, refused.operands), ProgramError) << ::testing::PrintToString(refused);
  }
}

TEST(Arithmetic, RefusesWhatPythonRefusesAndWhatIsTooLarge) {
  const auto refused = [](const std::string& target, const std::vector<c10::IValue>& operands,
                          const std::string& words) {
    SCOPED_TRACE(::testing::PrintToString(Sum{target, operands, {}}));
    expect_refused([&] { computed(target, operands); }, words);
  };
  const std::string zero = "arithmetic on sizes divides by zero.";
  const std::string large = "arithmetic on sizes goes beyond 64 bits.";
  refused("_operator.floordiv", {1, 0}, zero);
  refused("_operator.floordiv", {1.0, 0}, zero);
  refused("_operator.mod", {1, 0}, zero);
  refused("_operator.truediv", {1, 0}, zero);
  refused("_operator.add", {INT64_MAX, 1}, large);
  refused("_operator.sub", {INT64_MIN, 1}, large);
  refused("_operator.mul", {INT64_MAX, 2}, large);
  refused("_operator.neg", {INT64_MIN}, large);
  refused("_operator.pow", {2, 63}, large);
  refused("_operator.pow", {3, INT64_MAX}, large);
  refused("_operator.lshift", {1, 63}, large);
  refused("_operator.floordiv", {INT64_MIN, -1}, large);
  refused("builtins.int", {1e19}, large);
  refused("builtins.int", {std::numeric_limits<double>::quiet_NaN()}, large);
  refused("_operator.and_", {1.0, 1}, "bits are those of integers.");
  refused("_operator.add", {1}, "arithmetic wants 2 numbers.");
  refused("_operator.add", {1, "2"}, "arithmetic wants 2 numbers.");
  refused("builtins.max", {}, "the least or most of no numbers was asked for.");
}

}  // namespace
}  // namespace penstock::testing
