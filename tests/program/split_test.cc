// Splitting of programs: at modules and pipe_split() calls, evenly, or by a function.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "penstock/program/costs.h"
#include "tests/program/cuts.h"
#include "tests/program/refused.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(SplitAt, NamesTheNearestModule) {
  const Program program = exported("pair");
  expect_error<ProgramError>([&] { split_at(program, {{"secand", kBegin}}); },
                             "there is no module 'secand' that computes something.\n  Hint: did you mean second?");
  expect_error<ProgramError>([&] { split_at(program, {{"transformer", kEnd}}); },
                             "there is no module 'transformer' that computes something.");
  EXPECT_THROW(split_at(program, {{"", kBegin}}), ProgramError);
}

TEST(SplitAt, SuggestsAModuleInAContainer) {
  const Program program = exported("dropouts");
  expect_error<ProgramError>([&] { split_at(program, {{"blocks", kBegin}}); },
                             "there is no module 'blocks' that computes something: it contains modules and is not "
                             "called itself.\n  Hint: name one of those, such as blocks.0.");
}

TEST(SplitAt, CutsBeforeAndAfterModules) {
  const Program program = exported("pair");
  EXPECT_EQ(row_of(program, SplitSpec{}), "linear relu linear_1");
  EXPECT_EQ(row_of(program, {{"second", kBegin}}), "linear relu | linear_1");
  EXPECT_EQ(row_of(program, {{"first", kEnd}}), "linear | relu linear_1");
  EXPECT_EQ(row_of(program, {{"first", kEnd}, {"second", kBegin}}), "linear | relu | linear_1");
  // The order does not matter, and a name may occur twice.
  EXPECT_EQ(row_of(program, {{"second", kBegin}, {"first", kEnd}, {"second", kBegin}}), "linear | relu | linear_1");
  // No split point is before the first or after the last module.
  EXPECT_EQ(row_of(program, {{"first", kBegin}, {"second", kEnd}}), "linear relu linear_1");
}

TEST(SplitAt, CutsAtEveryCallOfAModule) {
  const Program program = from_zoo("called_twice");
  EXPECT_EQ(row_of(program, {{"block", kBegin}}), "linear | linear_1 tanh linear_2 | linear_3 tanh_1 linear_4");
  EXPECT_EQ(row_of(program, {{"block", kEnd}}), "linear linear_1 tanh | linear_2 linear_3 tanh_1 | linear_4");
  EXPECT_EQ(row_of(program, {{"block.1", kBegin}}), "linear linear_1 | tanh linear_2 linear_3 | tanh_1 linear_4");
}

TEST(SplitAt, CutsAtMarksAndMergesEmptyStages) {
  const Program program = exported("leading_marks");
  EXPECT_EQ(row_of(program, SplitSpec{}), "linear | linear_1 linear_2");
  EXPECT_EQ(row_of(program, {{"third", kBegin}}), "linear | linear_1 | linear_2");
  EXPECT_EQ(row_of(program, {{"second", kBegin}, {"first", kEnd}}), "linear | linear_1 linear_2");
  const Pipe pipe = pipeline(program);
  ASSERT_EQ(pipe.num_stages(), 2);
  EXPECT_EQ(pipe.info().stages[0].modules, Words{"first"});
  EXPECT_EQ(pipe.info().stages[1].modules, (Words{"second", "third"}));
}

TEST(SplitAt, CountsOperatorsInPlaceAsComputation) {
  const Program program = exported("ambiguous_alias");
  EXPECT_EQ(row_of(program, {{"doubles", kBegin}, {"last", kBegin}}), "linear dropout | mul_ | linear_1 mul");
}

TEST(SplitAt, CutsInsideOfModules) {
  const Program program = from_zoo("marks");
  EXPECT_EQ(pipeline(program).num_stages(), 4);
  const Pipe pipe = pipeline(program);
  EXPECT_EQ(pipe.info().stages[1].modules, (Words{"middle.left", "part of middle"}));
}

// Returns costs in whole seconds, so that sending costs nothing in comparison.
std::vector<NodeCost> seconds(const std::vector<double>& numbers) {
  std::vector<NodeCost> costs;
  for (const double number : numbers) costs.push_back({.flops = 0, .bytes = 0, .seconds = number});
  return costs;
}

TEST(SplitEvenly, BalancesTheTimeOfStages) {
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
  // Each of the two takes a second; the boundary after the sum has a fifth of the bytes of the one before it.
  const std::vector<int> cut = split_evenly(program, 2, seconds({0, 1, 0, 1, 0, 0, 0}));
  EXPECT_EQ(row_of(program, cut), "sym_size_int_1 linear sum_1 | linear_1 div mul sub");
}

TEST(SplitEvenly, IsWithinATenthOfTheBestOfAllCuts) {
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
    EXPECT_LE(slowest(found), 1.1 * best + 0.01) << row_of(program, found);
  }
}

// The blocks take about the same time. By one per cent, a boundary inside attention would be better.
TEST(SplitEvenly, CutsBetweenBlocksWhenThatTakesAboutTheSame) {
  struct Case {
    std::string name;
    int blocks;
  };
  for (const Case& one : {Case{"gpt", 3}, Case{"gpt_dynamic", 3}, Case{"gqa", 2}}) {
    const Program program = from_zoo(one.name);
    const Graph& graph = program.graph();
    SplitSpec between;
    for (int block = 1; block < one.blocks; ++block) between.emplace_back("blocks." + std::to_string(block), kBegin);
    // Each block takes a second, the first one 4 % more, and everything else little.
    std::vector<double> numbers(graph.nodes.size(), 0.001);
    for (int block = 0; block < one.blocks; ++block) {
      const std::string path = "blocks." + std::to_string(block);
      std::vector<std::size_t> inside;
      for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        for (int call = graph.nodes[i].call; call >= 0; call = graph.calls[static_cast<std::size_t>(call)].parent) {
          if (graph.calls[static_cast<std::size_t>(call)].path == path) inside.push_back(i);
        }
      }
      ASSERT_GT(inside.size(), 8U) << one.name << ", " << path;
      for (const std::size_t i : inside) numbers[i] = (block == 0 ? 1.04 : 1.0) / static_cast<double>(inside.size());
    }
    EXPECT_EQ(row_of(program, split_evenly(program, one.blocks, seconds(numbers))), row_of(program, between))
        << one.name;
  }
}

// Returns the tensors that are produced before a node, or are inputs, and used from it on.
int tensors_across(const Program& program, int border) {
  const Graph& graph = program.graph();
  std::set<int> made;
  std::set<int> across;
  const auto is_tensor = [&](int value) { return graph.values[static_cast<std::size_t>(value)].type.has_value(); };
  for (const ProgramInput& input : program.inputs()) {
    if (input.kind == ProgramInput::Kind::User) made.insert(input.value);
  }
  const auto use = [&](int value) {
    if (is_tensor(value) && made.contains(value)) across.insert(value);
  };
  for (int i = 0; i < static_cast<int>(graph.nodes.size()); ++i) {
    const Node& node = graph.nodes[static_cast<std::size_t>(i)];
    if (i < border) for_each_result(node, [&](int value) { made.insert(value); });
    if (i >= border) for_each_operand_value(node, use);
  }
  for (const ProgramOutput& output : program.outputs()) for_each_value(output.operand, use);
  return static_cast<int>(across.size());
}

TEST(SplitEvenly, TakesTheFewestTensorsOfTheCutsThatAreAboutAsFast) {
  for (const std::string name : {"mlp", "gpt", "gqa", "resnet", "unet", "encoder_decoder", "lstm"}) {
    const Program program = from_zoo(name);
    // The seconds are so many that sending is negligible.
    std::vector<NodeCost> costs = estimated_costs(program);
    double total = 0;
    for (NodeCost& cost : costs) total += cost.seconds *= 1e6;
    const int count = static_cast<int>(costs.size());
    std::vector<double> slowest(costs.size() + 1, total);
    double before = 0;
    for (int border = 1; border < count; ++border) {
      before += costs[static_cast<std::size_t>(border - 1)].seconds;
      slowest[static_cast<std::size_t>(border)] = std::max(before, total - before);
    }
    const double best = *std::min_element(slowest.begin(), slowest.end());
    int fewest = std::numeric_limits<int>::max();
    for (int border = 1; border < count; ++border) {
      // The limit is a little less than a tenth, since sending counts too.
      if (slowest[static_cast<std::size_t>(border)] > 1.0999 * best) continue;
      fewest = std::min(fewest, tensors_across(program, border));
    }
    const std::vector<int> cut = split_evenly(program, 2, costs);
    const int border = static_cast<int>(std::find(cut.begin(), cut.end(), 1) - cut.begin());
    EXPECT_LE(slowest[static_cast<std::size_t>(border)], 1.1001 * best) << name << ": " << row_of(program, cut);
    EXPECT_LE(tensors_across(program, border), fewest) << name << ": " << row_of(program, cut);
  }
}

TEST(SplitEvenly, WantsSomethingToComputeForEachStage) {
  const Program program = exported("length");
  // Arithmetic on sizes does not count as computation.
  for (const int stages : {0, -1, 5, 1000}) {
    expect_error<ProgramError>([&] { pipeline(program, stages); },
                               "the program cannot be split into " + std::to_string(stages) +
                                   " stages: it has 4 operations on tensors, and each stage needs at least one.");
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
// For so many nodes, the split considers only some boundaries.
TEST(SplitEvenly, BalancesAProgramOfThousandsOfNodes) {
  constexpr int kNodes = 5000;
  json model = small_model();
  json& graph = model["graph_module"]["graph"];
  std::string last = "relu";
  for (int i = 0; i < kNodes; ++i) {
    const std::string name = "more_" + std::to_string(i);
    graph["nodes"].push_back(node(name, "torch.ops.aten.relu.default", {{"self", tensor_argument(last)}},
                                  json::array({tensor_argument(name)})));
    graph["tensor_values"][name] = tensor_meta({2, 4}, true);
    last = name;
  }
  graph["outputs"] = json::array({tensor_argument(last)});
  model["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"] = tensor_argument(last);
  const Program program = read(small_records(model));
  std::vector<NodeCost> costs(program.graph().nodes.size());
  double whole = 0;
  for (std::size_t i = 0; i < costs.size(); ++i) whole += costs[i].seconds = 1e-3 * static_cast<double>(1 + i % 7);
  for (const int stages : {2, 3, 8}) {
    const std::vector<int> found = split_evenly(program, stages, costs);
    std::vector<double> seconds(static_cast<std::size_t>(stages), 0);
    for (std::size_t i = 0; i < costs.size(); ++i) seconds.at(static_cast<std::size_t>(found[i])) += costs[i].seconds;
    EXPECT_LE(std::ranges::max(seconds), 1.12 * whole / stages) << stages;
    EXPECT_GT(std::ranges::min(seconds), 0) << stages;
  }
}

TEST(SplitEvenly, CutsWhereItCan) {
  const Program program = exported("updated");
  ASSERT_EQ(pipeline(program, {{"first", kEnd}}).num_stages(), 2);
  EXPECT_EQ(pipeline(program, 2).num_stages(), 2);
}

// The input of dropout is used after its output was mutated.
TEST(SplitEvenly, SaysHowManyStagesThereCanBe) {
  const Program program = exported("ambiguous_alias");
  EXPECT_EQ(row_of(program, pipeline(program, 2).stages()), "linear | dropout mul_ linear_1 mul");
  EXPECT_EQ(row_of(program, pipeline(program, 3).stages()), "linear | dropout mul_ linear_1 | mul");
  for (const int stages : {4, 5}) {
    expect_error<ProgramError>([&] { pipeline(program, stages); },
                               "the program cannot be split into " + std::to_string(stages) +
                                   " stages: mutations in place keep nodes together, and 3 stages are the "
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
      "stage -1; stages are numbered from 0.");
}

TEST(SplitBy, NamesAValueThatIsUsedBeforeItsStage) {
  const Program program = exported("pair");
  expect_error<ProgramError>(
      [&] { pipeline(program, [](const Node& node) { return node.name == "relu" ? 0 : 1; }); },
      "node 'relu' (torch.ops.aten.relu.default) of the model itself (__main__.Pair) is in stage 0 and uses 'linear', "
      "which stage 1 produces; a stage can only use values of earlier stages.");
}

}  // namespace
}  // namespace penstock::internal::testing
