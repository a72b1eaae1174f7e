// Running of programs: inputs, weights, modes and errors.
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

// Arguments of the program "inputs".
class Inputs : public ::testing::Test {
 protected:
  const Program program = exported("inputs");
  Args args{at::ones({4, 5, 6}), list({at::ones({4, 6})}), 3};
  Kwargs kwargs{{"mask", at::ones({5, 5}, at::kBool)}, {"scale", 2}, {"how", "sum"}, {"more", c10::IValue()}};

  void expect_error(const std::string& message) {
    testing::expect_error<ProgramError>([&] { program.run(args, kwargs); }, message);
  }
  // Returns the symbol of a dimension of an input.
  std::string symbol(std::size_t input, std::size_t dimension) const {
    std::size_t user = 0;
    for (const ProgramInput& one : program.inputs()) {
      if (one.kind != ProgramInput::Kind::User || user++ != input) continue;
      return program.graph().values[static_cast<std::size_t>(one.value)].type->sizes[dimension].expression.text;
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
      "args.0, dimension 2: found 7, expected 6, which is static.\n  Hint: torch.export.export(…, dynamic_shapes=…) "
      "makes it dynamic.");
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

TEST_F(Inputs, AreTheValuesThatTheExportFixed) {
  args[2] = 4;
  expect_error("args.2: found int 4, expected int 3, the value that the program was exported with.");
  args[2] = 3.5;
  expect_error("args.2: found float 3.5, expected int 3, the value that the program was exported with.");
  args[2] = 3;
  kwargs["how"] = "mean";
  expect_error("kwargs.how: found str 'mean', expected str 'sum', the value that the program was exported with.");
  kwargs["how"] = "sum";
  kwargs["more"] = at::ones({1});
  expect_error(
      "kwargs.more: found float32 tensor of shape [1], expected None, the value that the program was exported with.");
  // Fixed arguments may be left out.
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
  // The nodes would run: every second of seven rows are four.
  expect_refused([&] { program.run({at::ones({4, 3}), at::ones({7, 3})}); },
                 "args.1, dimension 0: found 7, expected 8: it is 2*s77, and s77 is 4 by args.0, dimension 0.");
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
  // The failed run has no effect on later ones.
  EXPECT_TRUE(c10::GradMode::is_enabled());
  EXPECT_NO_THROW(program.run({at::zeros({2, 3}, at::kLong)}));
}

TEST(Run, FreesEachValueAfterItsLastUse) {
  const Program program = exported("chain");
  const c10::NoGradGuard no_grad;
  const at::Tensor x = at::ones({512, 512});
  constexpr std::int64_t kMegabyte = 1 << 20;
  const TensorBytes bytes;
  const c10::IValue output = program.run({x});
  // Alive at once are an operand, a result, and what is computed from half of it; the program has 24 values, and 8
  // unused ones.
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
  // Copies share the weights; another program does not.
  EXPECT_TRUE(at::equal(program.run({ids}).toTensor(), copy.run({ids}).toTensor()));
  EXPECT_TRUE(at::equal(before, exported("tied").run({ids}).toTensor()));
  // The tensors are the same as before, with the same gradients.
  EXPECT_TRUE(by_name(program.parameters()).at("head.weight").is_leaf());
  EXPECT_TRUE(by_name(program.parameters()).at("head.weight").requires_grad());
}

TEST(Weights, AreLeftAsTheyAreWhenOneCannotBeLoaded) {
  Program program = exported("tied");
  const NamedTensors before = copies(program.state_dict());
  const auto refused = [&](const std::function<void(NamedTensors&)>& change, const std::string& differences) {
    NamedTensors state = copies(before);
    for (auto& [name, tensor] : state) tensor.add_(1);
    change(state);
    expect_error<ProgramError>([&] { program.load_state_dict(state, "weights"); },
                               "weights: does not fit " + program.name() + ":\n  " + differences);
    expect_equal(before, program.state_dict());
  };
  refused([](NamedTensors& state) { state.emplace_back("tail.weight", at::ones({1})); },
          "tensor 'tail.weight' is unexpected: found float32[1].");
  refused([](NamedTensors& state) { state.emplace_back("scale.shift", at::ones({2})); },
          "tensor 'scale.shift': found float32[2], expected float32[1].");
  refused([](NamedTensors& state) { state.back().second = at::ones({2, 2}); },
          "tensor '" + before.back().first + "': found float32[2, 2], expected float32[1].");
  refused([](NamedTensors& state) { state.back().second = at::ones({1}, at::kDouble); },
          "tensor '" + before.back().first + "': found float64[1], expected float32[1].");
  refused([](NamedTensors& state) { std::erase_if(state, [](const auto& one) { return one.first == "frozen.bias"; }); },
          "tensor 'frozen.bias' is missing: the model has float32[4].");
}

TEST(Weights, OfATiedParameterHaveOneOfItsNames) {
  for (const std::string left_out : {"embedding.weight", "head.weight"}) {
    Program program = exported("tied");
    NamedTensors state = copies(program.state_dict());
    for (auto& [name, tensor] : state) tensor.add_(1);
    const NamedTensors whole = state;
    std::erase_if(state, [&](const auto& one) { return one.first == left_out; });
    // A non-persistent buffer may be present.
    state.emplace_back("scale.shift", at::full({1}, 7, at::kFloat));
    program.load_state_dict(state);
    expect_equal(whole, program.state_dict());
    EXPECT_TRUE(same(at::full({1}, 7, at::kFloat), by_name(program.buffers()).at("scale.shift")));
  }
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

// Runs all programs in one to four stages, on example inputs.
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
      // The second run sees the statistics of the first.
      for (int step = 0; step < 2; ++step) {
        const RandomScope scope(/*seed=*/3, step, /*microbatch=*/0, /*place=*/0);
        EXPECT_TRUE(same(one.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
      }
    }
  }
}

// Stages share buffers that nothing mutates.
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
  // A microbatch does not depend on the number of microbatches.
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
  expect_error<ProgramError>([&] { arguments_from(program, inputs); },
                             "the input 'kwargs.mask' is missing; found args.0, args.1.0.");
}

TEST(InputSplit, GivesMicrobatches) {
  const Program program = exported("pair");
  const std::vector<TensorsByName> parts = split_inputs(program, {{"args.0", counting({6, 4})}}, 2);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_TRUE(same(counting({6, 4}).narrow(0, 3, 3), parts[1].at("args.0")));
  expect_error<ProgramError>(
      [&] { split_inputs(program, {{"args.0", at::ones({7, 4})}}, 2); },
      "args.0: has 7 rows, which cannot be split into 2 microbatches.\n  Hint: use a number of microbatches that "
      "divides the rows, or export the model with dynamic_shapes.");
  expect_error<ProgramError>(
      [&] { split_inputs(program, {{"args.0", at::ones({1, 4})}}, 2); },
      "args.0: has 1 row, which cannot be split into 2 microbatches.\n  Hint: use fewer microbatches.");
  expect_error<ProgramError>(
      [&] { split_inputs(program, {{"args.0", at::ones({})}}, 2); },
      "args.0: has no rows, which cannot be split into 2 microbatches.\n  Hint: give a number, or a tensor "
      "without dimensions, as one row for each microbatch.");
}

TEST(InputSplit, IsUnevenWhereTheExportLeavesRowsOpen) {
  const Program program = exported("arithmetic");
  const std::vector<TensorsByName> parts = split_inputs(program, {{"args.0", counting({7, 2})}}, 3);
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_TRUE(same(counting({7, 2}).narrow(0, 0, 3), parts[0].at("args.0")));
  EXPECT_TRUE(same(counting({7, 2}).narrow(0, 3, 2), parts[1].at("args.0")));
  EXPECT_TRUE(same(counting({7, 2}).narrow(0, 5, 2), parts[2].at("args.0")));
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

}  // namespace
}  // namespace penstock::internal::testing
