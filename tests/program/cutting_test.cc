// A program in stages: where it is cut, what goes over the borders, and that it computes the same.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/pipe.h"
#include "penstock/program/split.h"
#include "penstock/tensor/random_scope.h"
#include "tests/program/piped.h"
#include "tests/program/programs.h"
#include "tests/program/zoo.h"
#include "tests/tensor/values.h"

namespace penstock::testing {
namespace {

constexpr SplitPoint kBegin = SplitPoint::BEGINNING;
constexpr SplitPoint kEnd = SplitPoint::END;

Program from_zoo(const std::string& name) {
  return zoo_model(name).program();
}

// The names of the nodes of each stage: "linear relu | linear_1".
std::string row_of(const Program& program, const std::vector<int>& stages) {
  std::string row;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (i > 0) row += stages[i] == stages[i - 1] ? " " : " | ";
    row += program.graph().nodes[i].name;
  }
  return row;
}
std::string row_of(const Program& program, const SplitSpec& spec) {
  return row_of(program, split_at(program, spec));
}

// "linear 0 -> 1", in order.
std::vector<std::string> crossings_of(const Pipe& pipe) {
  std::vector<std::string> crossings;
  for (const PipeInfo::Crossing& one : pipe.info().crossings) {
    crossings.push_back(one.name + " " + std::to_string(one.from) + " -> " + std::to_string(one.to));
  }
  return crossings;
}

using Words = std::vector<std::string>;

TEST(SplitAt, NamesTheNearestModule) {
  const Program program = exported("pair");
  expect_error<ProgramError>([&] { split_at(program, {{"secand", kBegin}}); },
                             "there is no module 'secand' that computes something.\n  Hint: did you mean second?");
  expect_error<ProgramError>([&] { split_at(program, {{"transformer", kEnd}}); },
                             "there is no module 'transformer' that computes something.");
  EXPECT_THROW(split_at(program, {{"", kBegin}}), ProgramError);
}

TEST(SplitAt, SaysOfAContainerWhatIsInIt) {
  const Program program = exported("dropouts");
  expect_error<ProgramError>([&] { split_at(program, {{"blocks", kBegin}}); },
                             "there is no module 'blocks' that computes something: it has modules in it, and is not "
                             "called itself.\n  Hint: name one of those, such as blocks.0.");
}

TEST(SplitAt, CutsBeforeAndAfterModules) {
  const Program program = exported("pair");
  EXPECT_EQ(row_of(program, SplitSpec{}), "linear relu linear_1");
  EXPECT_EQ(row_of(program, {{"second", kBegin}}), "linear relu | linear_1");
  EXPECT_EQ(row_of(program, {{"first", kEnd}}), "linear | relu linear_1");
  EXPECT_EQ(row_of(program, {{"first", kEnd}, {"second", kBegin}}), "linear | relu | linear_1");
  // In any order, and twice.
  EXPECT_EQ(row_of(program, {{"second", kBegin}, {"first", kEnd}, {"second", kBegin}}), "linear | relu | linear_1");
  // There is nothing before the first and after the last.
  EXPECT_EQ(row_of(program, {{"first", kBegin}, {"second", kEnd}}), "linear relu linear_1");
}

TEST(SplitAt, CutsAtEveryCallOfAModule) {
  const Program program = from_zoo("called_twice");
  EXPECT_EQ(row_of(program, {{"block", kBegin}}), "linear | linear_1 tanh linear_2 | linear_3 tanh_1 linear_4");
  EXPECT_EQ(row_of(program, {{"block", kEnd}}), "linear linear_1 tanh | linear_2 linear_3 tanh_1 | linear_4");
  EXPECT_EQ(row_of(program, {{"block.1", kBegin}}), "linear linear_1 | tanh linear_2 linear_3 | tanh_1 linear_4");
}

TEST(SplitAt, CutsAtMarksOfWhichSomeStandForNothing) {
  const Program program = exported("leading_marks");
  EXPECT_EQ(row_of(program, SplitSpec{}), "linear | linear_1 linear_2");
  EXPECT_EQ(row_of(program, {{"third", kBegin}}), "linear | linear_1 | linear_2");
  EXPECT_EQ(row_of(program, {{"second", kBegin}, {"first", kEnd}}), "linear | linear_1 linear_2");
  const Pipe pipe = pipeline(program);
  ASSERT_EQ(pipe.num_stages(), 2);
  EXPECT_EQ(pipe.info().stages[0].modules, Words{"first"});
  EXPECT_EQ(pipe.info().stages[1].modules, (Words{"second", "third"}));
}

TEST(SplitAt, TakesWhatWorksInPlaceForSomethingToCompute) {
  const Program program = exported("doubtful");
  EXPECT_EQ(row_of(program, {{"doubles", kBegin}, {"last", kBegin}}), "linear dropout | mul_ | linear_1 mul");
}

TEST(SplitAt, CutsInsideOfModules) {
  const Program program = from_zoo("marks");
  EXPECT_EQ(pipeline(program).num_stages(), 4);
  const Pipe pipe = pipeline(program);
  EXPECT_EQ(pipe.info().stages[1].modules, (Words{"middle.left", "part of middle"}));
}

// Costs that are whole seconds, beside which what is sent costs nothing.
std::vector<NodeCost> seconds(const std::vector<double>& numbers) {
  std::vector<NodeCost> costs;
  for (const double number : numbers) costs.push_back({.flops = 0, .bytes = 0, .seconds = number});
  return costs;
}

TEST(SplitEvenly, BalancesWhatStagesTake) {
  const Program program = from_zoo("mlp");
  ASSERT_EQ(program.graph().nodes.size(), 9U);
  const auto cut = [&](int stages, const std::vector<double>& numbers) {
    return split_evenly(program, stages, seconds(numbers));
  };
  EXPECT_EQ(cut(1, {1, 1, 1, 1, 1, 1, 1, 1, 1}), (std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(cut(3, {1, 1, 1, 1, 1, 1, 1, 1, 1}), (std::vector<int>{0, 0, 0, 1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(cut(2, {8, 1, 1, 1, 1, 1, 1, 1, 1}), (std::vector<int>{0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(cut(3, {9, 9, 9, 1, 1, 1, 1, 1, 1}), (std::vector<int>{0, 1, 2, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(cut(9, {0, 0, 0, 0, 0, 0, 0, 0, 0}), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(SplitEvenly, SendsAsLittleAsItCan) {
  const Program program = exported("length");
  // Each of the two is a second; what crosses after the sum is a fifth of what crosses before it.
  const std::vector<int> cut = split_evenly(program, 2, seconds({0, 1, 0, 1, 0, 0, 0}));
  EXPECT_EQ(row_of(program, cut), "sym_size_int_1 linear sum_1 | linear_1 div mul sub");
}

TEST(SplitEvenly, IsAsGoodAsTheBestOfAllCuts) {
  const Program program = from_zoo("mlp");
  const int count = static_cast<int>(program.graph().nodes.size());
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 1);
  for (int number = 0; number < 100; ++number) {
    SCOPED_TRACE("PENSTOCK_SEED=" + std::to_string(seed) + ", case " + std::to_string(number));
    Random random(seed, static_cast<std::uint64_t>(number));
    std::vector<double> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(static_cast<double>(random.between(0, 9)));
    const int stages = static_cast<int>(random.between(2, 4));
    const auto slowest = [&](const std::vector<int>& of_node) {
      std::vector<double> sums(static_cast<std::size_t>(stages), 0);
      for (std::size_t i = 0; i < of_node.size(); ++i) sums[static_cast<std::size_t>(of_node[i])] += numbers[i];
      return *std::max_element(sums.begin(), sums.end());
    };
    double best = std::numeric_limits<double>::infinity();
    const std::function<void(std::vector<int>)> try_all = [&](std::vector<int> so_far) {
      if (static_cast<int>(so_far.size()) == count) {
        if (so_far.back() == stages - 1) best = std::min(best, slowest(so_far));
        return;
      }
      for (const int step : {0, 1}) {
        const int stage = so_far.back() + step;
        if (stage >= stages) continue;
        so_far.push_back(stage);
        try_all(so_far);
        so_far.pop_back();
      }
    };
    try_all({0});
    const std::vector<int> found = split_evenly(program, stages, seconds(numbers));
    EXPECT_EQ(found.back(), stages - 1);
    EXPECT_EQ(slowest(found), best) << row_of(program, found);
  }
}

TEST(SplitEvenly, WantsSomethingToComputeForEachStage) {
  const Program program = exported("length");
  // Sizes and sums of them are nothing to compute.
  for (const int stages : {0, -1, 5, 1000}) {
    expect_error<ProgramError>([&] { pipeline(program, stages); },
                               "the program cannot be cut into " + std::to_string(stages) +
                                   " stages: it has 4 operations on tensors, and a stage at least one.");
  }
  EXPECT_EQ(pipeline(program, 4).num_stages(), 4);
  EXPECT_EQ(pipeline(exported("identity"), 1).num_stages(), 1);
  EXPECT_THROW(pipeline(exported("identity"), 2), ProgramError);
}

TEST(SplitEvenly, GivesAsManyStagesAsAreAskedFor) {
  for (const std::string name :
       {"pair", "tied", "dropouts", "norms", "mixed", "leading_marks", "masked", "recurrent"}) {
    const Program program = exported(name);
    for (int stages = 1; stages <= 8; ++stages) {
      std::vector<int> cut;
      try {
        cut = split_evenly(program, stages, estimated_costs(program));
      } catch (const ProgramError&) {
        continue;
      }
      EXPECT_EQ(cut.back() + 1, stages) << name << ": " << row_of(program, cut);
    }
  }
}

// The buffer is read by the third node and written to by the last.
TEST(SplitEvenly, CutsWhereItCan) {
  const Program program = exported("updated");
  ASSERT_EQ(pipeline(program, {{"first", kEnd}}).num_stages(), 2);
  EXPECT_EQ(pipeline(program, 2).num_stages(), 2);
}

// What dropout is given is used after what it gave was written to.
TEST(SplitEvenly, SaysHowManyStagesThereCanBe) {
  const Program program = exported("doubtful");
  EXPECT_EQ(row_of(program, pipeline(program, 2).stages()), "linear | dropout mul_ linear_1 mul");
  EXPECT_EQ(row_of(program, pipeline(program, 3).stages()), "linear | dropout mul_ linear_1 | mul");
  for (const int stages : {4, 5}) {
    expect_error<ProgramError>([&] { pipeline(program, stages); },
                               "the program cannot be cut into " + std::to_string(stages) +
                                   " stages: what is written to in place keeps nodes together, and 3 stages are the "
                                   "most.");
  }
}

TEST(SplitBy, TakesAnyNumbersThatGoUp) {
  const Program program = exported("pair");
  const auto by_name = [&](int linear, int relu, int last) {
    return split_by(program, [=](const Node& node) {
      return node.name == "linear" ? linear : node.name == "relu" ? relu : last;
    });
  };
  EXPECT_EQ(by_name(0, 1, 2), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(by_name(3, 3, 9), (std::vector<int>{0, 0, 1}));
  expect_error<ProgramError>(
      [&] { by_name(0, -1, 1); },
      "node 'relu' (torch.ops.aten.relu.default) of the model itself (__main__.Pair) was put into "
      "stage -1; stages count from 0.");
}

TEST(SplitBy, NamesAValueThatIsUsedBeforeItsStage) {
  const Program program = exported("pair");
  expect_error<ProgramError>(
      [&] { pipeline(program, [](const Node& node) { return node.name == "relu" ? 0 : 1; }); },
      "node 'relu' (torch.ops.aten.relu.default) of the model itself (__main__.Pair) is in stage 0 and uses 'linear', "
      "which stage 1 makes; stages take values of earlier ones alone.");
}

TEST(Cutting, SendsANumberToTheStageThatUsesIt) {
  const auto make = [] { return pipeline(exported("number"), {{"second", kBegin}}); };
  const Program program = make().program();
  EXPECT_EQ(crossings_of(make()), (Words{"relu 0 -> 1", "times 0 -> 1"}));
  const TensorsByName inputs{{"args.0", counting({12, 4})}, {"args.1", at::full({4}, 3, at::kLong)}};
  expect_what_one_process_gives(make, in_a_row("1F1B", 2), inputs);

  const auto expect_error_for = [&](const at::Tensor& number, const std::string& message) {
    expect_error<ProgramError>([&] { arguments_from(program, {{"args.0", counting({3, 4})}, {"args.1", number}}); },
                               message);
  };
  expect_error_for(at::arange(4), "args.1: is a number, the same for all microbatches; found several.");
  expect_error_for(at::empty({0}, at::kLong), "args.1: is a number, the same for all microbatches; found none.");
  expect_error_for(at::ones({1}), "args.1: found float32, expected an integer.");
}

TEST(Cutting, LeavesTheProgramAsItWas) {
  const Program program = exported("dropouts");
  std::vector<std::pair<std::string, at::Tensor>> before;
  for (const auto& [name, tensor] : program.state_dict()) before.emplace_back(name, tensor.detach().clone());
  const std::string nodes = row_of(program, SplitSpec{});
  const Pipe first = pipeline(program, {{"blocks.1", kBegin}});
  const Pipe second = pipeline(program, {{"blocks.1", kBegin}, {"blocks.2", kBegin}});
  const Pipe third = pipeline(program, {{"blocks.1", kBegin}});
  EXPECT_EQ(first.num_stages(), 2);
  EXPECT_EQ(second.num_stages(), 3);
  EXPECT_EQ(third.stages(), first.stages());
  EXPECT_EQ(row_of(program, SplitSpec{}), nodes);
  const NamedTensors after = program.state_dict();
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].first, after[i].first);
    EXPECT_TRUE(same_bits(before[i].second, after[i].second));
  }
  const Arguments arguments = arguments_from(program, example_inputs(program, 1, 1));
  const auto run = [&](const auto& one) {
    const RandomScope scope(1, 2, 3, 4);
    return one.run(arguments.args, arguments.kwargs);
  };
  EXPECT_TRUE(same(run(program), run(first)));
  EXPECT_TRUE(same(run(program), run(second)));
  EXPECT_TRUE(same(run(program), run(third)));
}

TEST(Cutting, SaysWhichStagesThereAre) {
  const Pipe pipe = pipeline(exported("pair"), 2);
  for (const int stage : {-1, 2}) {
    const std::string message = "there is no stage " + std::to_string(stage) + " of 2; they go from 0 to 1.";
    expect_error<ProgramError>([&] { pipe.get_stage_module(stage); }, message);
    expect_error<ProgramError>([&] { pipe.build_stage(stage); }, message);
    expect_error<ProgramError>([&] { pipe.state_dict(stage); }, message);
  }
}

TEST(Cutting, KeepsNamesAndTensors) {
  for (const std::string name : {"tied", "norms", "dropouts", "masked"}) {
    SCOPED_TRACE(name);
    const Program program = exported(name);
    const Pipe pipe = pipeline(program, 3);
    std::set<std::string> names;
    for (int stage = 0; stage < 3; ++stage) {
      for (const auto& [key, tensor] : pipe.state_dict(stage)) names.insert(key);
    }
    std::set<std::string> expected;
    for (const auto& [key, tensor] : program.state_dict()) expected.insert(key);
    EXPECT_EQ(names, expected);
    EXPECT_TRUE(pipe.get_stage_module(0).parameters[0].second.is_same(program.parameters()[0].second));
  }
}

TEST(Cutting, LoadsAStageByTheNamesThatItHas) {
  const Program program = exported("pair");
  const Pipe pipe = pipeline(program, {{"second", kBegin}});
  NamedTensors state;
  for (const auto& [name, tensor] : pipe.state_dict(1)) state.emplace_back(name, at::ones_like(tensor));
  pipe.load_state_dict(1, state);
  EXPECT_EQ(pipe.run({at::zeros({3, 4})}).toTensor().min().item<double>() > 0.99, true);
  state[0].second = at::ones({1});
  expect_error<ProgramError>([&] { pipe.load_state_dict(1, state); },
                             "stage 1: 'second.weight': found float32 tensor of shape [1], expected float32 tensor of "
                             "shape [2, 4].");
  state.erase(state.begin());
  expect_error<ProgramError>([&] { pipe.load_state_dict(1, state); }, "stage 1: 'second.weight' is missing.");
}

TEST(Cutting, IsPrinted) {
  const auto printed = [](const Pipe& pipe) {
    std::ostringstream text;
    text << pipe;
    return text.str();
  };
  EXPECT_EQ(printed(pipeline(exported("pair"), {{"second", kBegin}})),
            program_path("pair.pt2") +
                ": 2 stages\n"
                "  stage 0: first\n"
                "    20 parameters, 108 FLOP a forward, 96 B kept\n"
                "    -> stage 1: relu float32[3, 4]\n"
                "  stage 1: second\n"
                "    10 parameters, 48 FLOP a forward, 24 B kept\n");
  EXPECT_EQ(printed(pipeline(exported("tied"), {{"head", kBegin}})),
            program_path("tied.pt2") +
                ": 2 stages\n"
                "  stage 0: embedding, scale, frozen\n"
                "    52 parameters, 264 FLOP a forward, 384 B kept\n"
                "    -> stage 1: linear float32[2, 3, 4]\n"
                "  stage 1: head\n"
                "    32 parameters, 384 FLOP a forward, 192 B kept\n"
                "  shared: embedding.weight by stages 0, 1\n");
  EXPECT_EQ(printed(pipeline(exported("identity"))), program_path("identity.pt2") +
                                                         ": 1 stage\n"
                                                         "  stage 0: 0 operations of the model itself\n"
                                                         "    0 parameters, 0 FLOP a forward, 0 B kept\n");
}

TEST(Crossing, OfWhatIsCheapIsNone) {
  const Pipe pipe = pipeline(exported("masked"), {{"layers.1", kBegin}, {"layers.2", kBegin}});
  EXPECT_EQ(crossings_of(pipe), (Words{"matmul_1 0 -> 1", "matmul_3 1 -> 2"}));
  // The constant that the mask is made of is in each stage.
  for (const PipeInfo::Stage& stage : pipe.info().stages) EXPECT_EQ(stage.buffers, 5);
  EXPECT_EQ(pipe.info().crossings[0].type, "float32[2, 5, 4]");
  EXPECT_EQ(pipe.info().crossings[0].bytes, 160);
  expect_what_one_process_gives(
      [] { return pipeline(exported("masked"), {{"layers.1", kBegin}, {"layers.2", kBegin}}); }, in_a_row("1F1B", 3));
}

TEST(Crossing, OfANumberIsATensorOfOneElement) {
  const MakePipe make = [] { return pipeline(exported("length"), {{"second", kBegin}}); };
  const Pipe pipe = make();
  const auto& crossings = pipe.info().crossings;
  ASSERT_EQ(crossings.size(), 2U);
  EXPECT_EQ(crossings_of(pipe), (Words{"sum_1 0 -> 1", "sym_size_int_1 0 -> 1"}));
  EXPECT_EQ(crossings[1].type, "int");
  EXPECT_EQ(crossings[1].bytes, 8);
  expect_what_one_process_gives(make, in_a_row("1F1B", 2));
  // For other sizes, too.
  const at::Tensor x = at::ones({2, 9, 4});
  const auto output = pipe.run({x}).toTupleRef().elements().vec();
  EXPECT_EQ(output[1].toInt(), 17);
  EXPECT_TRUE(same(pipe.program().run({x}), pipe.run({x})));
}

TEST(Crossing, OfANumberIsNoneWhereItsTensorGoesToo) {
  const Pipe pipe = pipeline(exported("inputs"), {{"linear", kEnd}});
  std::vector<std::string> names = crossings_of(pipe);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (Words{"linear 0 -> 1", "mask 0 -> 1", "y_0 0 -> 1"}));
}

TEST(Crossing, OfAnInputThatALaterStageIsTheFirstToUse) {
  const MakePipe make = [] { return pipeline(from_zoo("late_input"), {{"layers.0", kBegin}, {"layers.1", kBegin}}); };
  EXPECT_EQ(crossings_of(make()), (Words{"tanh 0 -> 1", "late 0 -> 2", "tanh_1 1 -> 2", "tanh 1 -> 2"}));
  expect_what_one_process_gives(make, in_a_row("1F1B", 3));
}

TEST(Crossing, OfAnOutputOfTheFirstStageGoesToTheLast) {
  const Pipe pipe = pipeline(from_zoo("late_input"), {{"layers.0", kBegin}, {"last", kBegin}});
  const Program& program = pipe.program();
  const Arguments arguments = arguments_from(program, example_inputs(program, 1, 3));
  EXPECT_TRUE(same(program.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
}

TEST(Crossing, GoesFromUserToUser) {
  const Pipe pipe = pipeline(from_zoo("several_users"), {{"b", kBegin}, {"c", kBegin}, {"d", kBegin}});
  // What stage 0 has made for all of them, stage 1 hands on to stage 2, and that to stage 3.
  const std::string made = pipe.info().crossings.front().name;
  std::vector<std::string> ways;
  for (const PipeInfo::Crossing& one : pipe.info().crossings) {
    if (one.name == made) ways.push_back(std::to_string(one.from) + " -> " + std::to_string(one.to));
  }
  EXPECT_EQ(ways, (Words{"0 -> 1", "1 -> 2", "2 -> 3"}));
}

TEST(Buffers, ThatALaterStageWritesToCannotBeReadBefore) {
  const Program program = exported("written_later");
  expect_error<ProgramError>(
      [&] { pipeline(program, {{"second", kBegin}}); },
      "'second.count' is written to in stage 1, and node 'mul' (torch.ops.aten.mul.Tensor) of "
      "module 'first' (__main__.Reads) uses it in stage 0: the next microbatch would not see what "
      "was written.\n  Hint: cut so that both are in one stage.");
  EXPECT_EQ(pipeline(program, {{"second.linear", kBegin}}).num_stages(), 2);
}

class Buffered : public ::testing::TestWithParam<std::string> {};

TEST_P(Buffered, AreReadAfterTheStageThatWritesToThem) {
  expect_what_one_process_gives([] { return pipeline(exported("counted"), {{"second", kBegin}}); },
                                in_a_row(GetParam(), 2));
}

// Each forward keeps what the buffer was for its own backward, although the next one writes to it before that.
TEST_P(Buffered, AreKeptForTheBackwardAsTheyWere) {
  expect_what_one_process_gives([] { return pipeline(exported("averaged"), {{"layers.1", kBegin}}); },
                                in_a_row(GetParam(), 2));
}

TEST_P(Buffered, LearnInEveryStage) {
  expect_what_one_process_gives([] { return pipeline(exported("norms"), 2); }, in_a_row(GetParam(), 2));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Buffered, ::testing::Values("GPipe", "1F1B"),
                         [](const auto& one) { return one.param == "1F1B" ? "OneFOneB" : one.param; });

TEST(InPlace, WritesThatOnlyEvaluationSeesAreRefusedAcrossStages) {
  expect_error<ProgramError>(
      [&] {
        pipeline(exported("doubtful"), [&](const Node& node) {
          return node.name == "linear" || node.name == "dropout" ? 0 : node.name == "mul_" ? 1 : 2;
        });
      },
      "node 'mul_' (torch.ops.aten.mul_.Tensor) of module 'doubles' (__main__.Doubtful.Doubles) writes in place to "
      "what "
      "node 'linear_1' (torch.ops.aten.linear.default) of module 'last.linear' (torch.nn.modules.linear.Linear) uses "
      "in "
      "another stage, and only in evaluation are these one tensor: 'linear' and 'dropout'.\n  Hint: cut so that both "
      "are "
      "in one stage.");
}

// Both are in one stage there, and both come from another one.
TEST(InPlace, WritesThatOnlyEvaluationSeesAreSeenOrRefusedBehindABorder) {
  Program program = exported("doubtful");
  program.eval();
  const at::Tensor x = counting({2, 4});
  try {
    const Pipe pipe = pipeline(program, {{"doubles", kBegin}});
    const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 1});
    Pipeline in_stages(pipe.build_stages(), pipe.wiring(), schedule, options_of(pipe));
    EXPECT_TRUE(same(program.run({x}).toTensor().detach(), in_stages.eval({x}).output));
  } catch (const ProgramError& error) {
    EXPECT_NE(std::string(error.what()).find("only in evaluation are these one tensor"), std::string::npos);
  }
}

TEST(InPlace, WritesAreSeenByLaterStages) {
  const ZooModel model = zoo_model("inplace");
  for (const ZooCut& cut : model.cuts) {
    SCOPED_TRACE(cut.why);
    const Pipe pipe = pipeline(model.program(), cut.at);
    const Program whole = model.program();
    for (const Arguments& arguments : microbatches_of(model, whole)) {
      EXPECT_TRUE(same(whole.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
    }
  }
}

// The microbatches are views of one batch.
TEST(InPlace, WritesToAnInputDoNotReachOtherMicrobatches) {
  expect_what_one_process_gives([] { return pipeline(exported("writes_input"), {{"second", kBegin}}); },
                                in_a_row("1F1B", 2));
}

struct Shared {
  std::string name;
  Program (*read)(const std::string&);
  SplitSpec cut;
};

std::vector<Shared> shared_models() {
  return {
      {"tied", exported, {{"head", kBegin}}},
      {"shared_across", from_zoo, {{"middle", kBegin}}},
      {"called_twice", from_zoo, {{"middle", kBegin}}},
      {"peer_example", from_zoo, {{"linear0", kEnd}}},
  };
}

TEST(MultiUse, OfAParameterInSeveralStagesIsReported) {
  const Pipe pipe = pipeline(from_zoo("shared_across"), {{"middle", kBegin}});
  const std::vector<std::map<int, std::string>> expected = {{{0, "first.linear.weight"}, {1, "first.linear.weight"}},
                                                            {{0, "first.linear.bias"}, {1, "first.linear.bias"}}};
  EXPECT_EQ(pipe.replicated_params(), expected);
  ASSERT_EQ(pipe.shared_parameters().size(), 2U);
  EXPECT_EQ(pipe.shared_parameters()[0],
            (std::vector<SharedParameter>{{0, "first.linear.weight"}, {1, "first.linear.weight"}}));
  // A stage's state has all names of it.
  std::set<std::string> names;
  for (const auto& [name, tensor] : pipe.state_dict(1)) names.insert(name);
  EXPECT_TRUE(names.contains("first.linear.weight"));
  EXPECT_TRUE(names.contains("last.linear.weight"));
}

TEST(MultiUse, ByCopiesGivesTheGradientsOfOneProcess) {
  for (const Shared& model : shared_models()) {
    SCOPED_TRACE(model.name);
    const MakePipe make = [&] { return pipeline(model.read(model.name), model.cut); };
    EXPECT_FALSE(make().shared_parameters().empty());
    const Pipe pipe = make();
    const auto& places = pipe.shared_parameters().front();
    const auto tensor = [&](int stage) {
      for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
        if (name == places.front().name) return parameter;
      }
      return at::Tensor();
    };
    EXPECT_FALSE(tensor(0).is_alias_of(tensor(1)));
    EXPECT_TRUE(same_bits(tensor(0), tensor(1)));
    for (const char* const schedule : {"GPipe", "1F1B"}) {
      expect_what_one_process_gives(make, in_a_row(schedule, make().num_stages()));
    }
  }
}

TEST(MultiUse, BySendingGivesTheGradientsOfOneProcessToTheBit) {
  for (const Shared& model : shared_models()) {
    SCOPED_TRACE(model.name);
    const MakePipe make = [&] {
      const Program program = model.read(model.name);
      return Pipe(program, split_at(program, model.cut), MultiUseParameterConfig::TRANSMIT);
    };
    const Pipe pipe = make();
    EXPECT_TRUE(pipe.shared_parameters().empty());
    EXPECT_TRUE(pipe.replicated_params().empty());
    // Each parameter is in one stage.
    std::set<std::string> names;
    for (int stage = 0; stage < pipe.num_stages(); ++stage) {
      for (const auto& [name, tensor] : pipe.get_stage_module(stage).parameters) {
        EXPECT_TRUE(names.insert(name).second) << name;
      }
    }
    for (const char* const schedule : {"GPipe", "1F1B"}) {
      expect_what_one_process_gives(make, in_a_row(schedule, pipe.num_stages()));
    }
    expect_what_one_process_gives(make, in_a_row("Interleaved1F1B", 1, pipe.num_stages()));
    if (pipe.num_stages() == 2) expect_what_one_process_gives(make, in_a_row("ZBVZeroBubble", 1, 2));
  }
}

TEST(RandomNumbers, AreTheSameForAnyCutAndSchedule) {
  struct Case {
    const char* schedule;
    int ranks;
    int stages_per_rank;
  };
  const std::vector<Case> cases = {{"1F1B", 1, 1},
                                   {"1F1B", 2, 1},
                                   {"1F1B", 4, 1},
                                   {"GPipe", 3, 1},
                                   {"Interleaved1F1B", 1, 3},
                                   {"Interleaved1F1B", 2, 2},
                                   {"ZBVZeroBubble", 1, 2},
                                   {"ZBVZeroBubble", 2, 2}};
  const auto make = [](int stages) { return pipeline(exported("dropouts"), stages); };
  ASSERT_TRUE(make(1).program().is_training());
  const Outcome whole = run_in_one_process(make(1), in_a_row("1F1B", 1), /*seed=*/11);
  for (const Case& one : cases) {
    SCOPED_TRACE(std::string(one.schedule) + " on " + std::to_string(one.ranks) + " ranks");
    const Schedule schedule = in_a_row(one.schedule, one.ranks, one.stages_per_rank);
    const MakePipe cut = [&] { return make(schedule.stages()); };
    expect_what_one_process_gives(cut, schedule, /*seed=*/11);
    // And what is drawn does not depend on the cut.
    const Outcome found = run_in_stages(cut(), schedule, /*seed=*/11);
    for (std::size_t i = 0; i < found.losses.size(); ++i) EXPECT_TRUE(same(whole.losses[i], found.losses[i])) << i;
  }
}

TEST(RandomNumbers, AreTheSameWhereverABlockIsCut) {
  const Outcome whole = run_in_one_process(pipeline(exported("dropouts"), 1), in_a_row("1F1B", 1), /*seed=*/11);
  const Program program = exported("dropouts");
  for (int at = 1; at < static_cast<int>(program.graph().nodes.size()); ++at) {
    SCOPED_TRACE("before " + describe(program.graph(), program.graph().nodes[static_cast<std::size_t>(at)]));
    std::vector<int> stages(program.graph().nodes.size(), 0);
    std::fill(stages.begin() + at, stages.end(), 1);
    const Outcome found = run_in_stages(Pipe(exported("dropouts"), stages), in_a_row("1F1B", 2), /*seed=*/11);
    for (std::size_t i = 0; i < found.losses.size(); ++i) EXPECT_TRUE(same(whole.losses[i], found.losses[i])) << i;
    // All parameters are in one stage or the other; with one stage, microbatches come in the same order.
    std::size_t count = 0;
    for (const auto& [place, gradient] : found.gradients) {
      EXPECT_TRUE(same_bits(whole.gradients.at({0, place.second}), gradient)) << place.second;
      ++count;
    }
    EXPECT_EQ(count, whole.gradients.size());
  }
}

TEST(RandomNumbers, AreOthersWithAnotherSeedAndInTheNextStep) {
  const auto make = [] { return pipeline(exported("dropouts"), 2); };
  const Schedule schedule = in_a_row("1F1B", 2);
  const Outcome one = run_in_stages(make(), schedule, /*seed=*/1);
  const Outcome again = run_in_stages(make(), schedule, /*seed=*/1);
  const Outcome other = run_in_stages(make(), schedule, /*seed=*/2);
  EXPECT_TRUE(same(one.losses[0], again.losses[0]));
  EXPECT_FALSE(same(one.losses[0], other.losses[0]));

  const Pipe pipe = make();
  Pipeline pipeline(pipe.build_stages(), pipe.wiring(), schedule, options_of(pipe, /*seed=*/1));
  const Arguments batch = batch_of(pipe.program());
  const at::Tensor first = pipeline.step(batch.args, batch.kwargs).losses[0];
  EXPECT_TRUE(same(one.losses[0], first));
  EXPECT_FALSE(same(first, pipeline.step(batch.args, batch.kwargs).losses[0]));
}

}  // namespace
}  // namespace penstock::testing
