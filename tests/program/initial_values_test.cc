// Models that were exported on the meta device: their weights are drawn where they are used.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "penstock/program/interpreter/program_state.h"
#include "penstock/schedule/generators.h"
#include "tests/program/cuts.h"
#include "tests/program/piped.h"
#include "tests/program/programs.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

using Values = std::map<std::string, at::Tensor>;

Program initialised(std::uint64_t seed = 3) {
  Program program = exported("uninitialised");
  program.initialise(seed);
  return program;
}

Values values_of(const Program& program) {
  Values values;
  for (const NamedTensors& tensors : {program.parameters(), program.buffers()}) {
    for (const auto& [name, tensor] : tensors) values.emplace(name, tensor.detach());
  }
  return values;
}

TEST(InitialValues, AreThoseOfPyTorchsModules) {
  const Values values = values_of(initialised());
  const auto expect_uniform = [&](const std::string& name, double bound) {
    const at::Tensor& found = values.at(name);
    EXPECT_LE(found.abs().max().item<double>(), bound) << name;
    EXPECT_GT(found.abs().max().item<double>(), bound / 2) << name;
    EXPECT_LT(std::abs(found.mean().item<double>()), bound / 2) << name;
  };
  expect_uniform("convolution.weight", 1 / std::sqrt(3.0 * 8));
  expect_uniform("convolution.bias", 1 / std::sqrt(3.0 * 8));
  expect_uniform("recurrent.weight_ih_l0", 1 / std::sqrt(8.0));
  expect_uniform("recurrent.bias_hh_l0", 1 / std::sqrt(8.0));
  expect_uniform("attention.in_proj_weight", std::sqrt(6.0 / (24 + 8)));
  expect_uniform("attention.out_proj.weight", 1 / std::sqrt(8.0));
  const at::Tensor& embedding = values.at("embedding.weight");
  EXPECT_NEAR(embedding.std().item<double>(), 1, 0.3);
  // Its padding_idx.
  EXPECT_EQ(embedding[3].abs().max().item<double>(), 0);
  EXPECT_GT(embedding[2].abs().min().item<double>(), 0);
  for (const char* name : {"attention.in_proj_bias", "norm.bias", "norm.running_mean", "last.bias"}) {
    EXPECT_EQ(values.at(name).abs().max().item<double>(), 0) << name;
  }
  EXPECT_EQ(values.at("norm.num_batches_tracked").item<std::int64_t>(), 0);
  for (const char* name : {"norm.weight", "norm.running_var", "last.weight"}) {
    EXPECT_TRUE(at::equal(values.at(name), at::ones({8}))) << name;
  }
}

TEST(InitialValues, DependOnTheSeedAndTheNameAlone) {
  const Values values = values_of(initialised());
  for (const auto& [name, value] : values_of(initialised())) EXPECT_TRUE(same_bits(value, values.at(name))) << name;
  EXPECT_FALSE(at::equal(values_of(initialised(4)).at("embedding.weight"), values.at("embedding.weight")));
  EXPECT_FALSE(at::equal(values.at("recurrent.weight_ih_l0"), values.at("recurrent.weight_hh_l0")));
  // The last stage first.
  const Pipe pipe = pipeline(initialised(), 3);
  for (int stage = 2; stage >= 0; --stage) {
    for (const auto& [name, value] : pipe.state_dict(stage)) {
      EXPECT_TRUE(same_bits(value.detach(), values.at(name))) << name;
    }
  }
}

TEST(InitialValues, AreTheSameForTiedParameters) {
  const Program program = initialised();
  const std::map<std::string, at::Tensor> parameters = by_name(program.parameters());
  EXPECT_TRUE(parameters.at("head.weight").is_same(parameters.at("embedding.weight")));
  EXPECT_EQ(pipeline(program, {{"last", SplitPoint::BEGINNING}}).shared_parameters().size(), 1U);
}

TEST(InitialValues, AreDrawnForTheStagesThatAreBuilt) {
  const Program program = initialised();
  const Pipe pipe = pipeline(program, 3);
  pipe.get_stage_module(2);
  std::size_t drawn = 0;
  for (const auto& [name, tensor] : state_of(program).weights->by_name()) {
    if (state_of(program).weights->is_loaded(tensor)) ++drawn;
  }
  EXPECT_GT(drawn, 0U);
  EXPECT_LE(drawn, pipe.get_stage_module(2).parameters.size() + pipe.get_stage_module(2).buffers.size());
}

TEST(InitialValues, TrainInStagesAsInOneProcess) {
  const Schedule schedule = generate("ZBVZeroBubble", {.ranks = 2, .microbatches = kMicrobatches});
  const auto make = [] { return pipeline(initialised(), 4); };
  const Outcome expected = run_in_one_process(make(), schedule, /*seed=*/1);
  const Pipe pipe = make();
  expect_same(expected, run_in_stages(pipe, schedule, inputs_of(pipe.program()), /*seed=*/1), pipe.shared_parameters());
}

TEST(InitialValues, MayBeAFunctionOfTheUser) {
  Program program = exported("uninitialised_places");
  program.initialise(0, [modules = initial_values_of_modules(program)](const std::string& name, at::Tensor& values) {
    if (name == "places") {
      EXPECT_TRUE(values.requires_grad());
      values.fill_(0.5);
    } else {
      modules(name, values);
    }
  });
  const Values values = values_of(program);
  EXPECT_TRUE(at::equal(values.at("places"), at::full({5, 8}, 0.5)));
  EXPECT_GT(values.at("head.weight").abs().max().item<double>(), 0);
}

TEST(InitialValues, AreRefusedForOtherModules) {
  Program program = exported("uninitialised_places");
  const std::string missing = message_of<ProgramError>([&] { program.parameters(); });
  EXPECT_NE(missing.find("' has no values: the model was exported on the meta device.\n  Hint: give the values of all "
                         "weights, or draw initial values with Program::initialise."),
            std::string::npos)
      << missing;
  program.initialise(0);
  const std::string unknown = message_of<ProgramError>([&] { program.parameters(); });
  EXPECT_NE(unknown.find("uninitialised_places.pt2: 'places' has no initial values, as "), std::string::npos)
      << unknown;
}

TEST(InitialValues, AreReplacedByGivenWeights) {
  const Values values = values_of(initialised());
  Program program = exported("uninitialised");
  EXPECT_TRUE(program.has_no_values());
  EXPECT_FALSE(exported("identity").has_no_values());
  program.load_state_dict({values.begin(), values.end()}, "state", Program::CopyWhen::WhenUsed);
  for (const auto& [name, value] : values_of(program)) EXPECT_TRUE(same_bits(value, values.at(name))) << name;
  const Folder folder;
  EXPECT_NE(message_of<ProgramError>([&] { program.save(folder / "copy.pt2"); })
                .find("was exported on the meta device, and its file has no room for weights.\n  Hint: write them to a "
                      "safetensors file."),
            std::string::npos);
}

}  // namespace
}  // namespace penstock::internal::testing
