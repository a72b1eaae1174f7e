// Weights stay in the file until they are used, so that a process has memory for those of its own stages.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/pipe.h"
#include "penstock/program/reader/zip_directory.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/program/piped.h"
#include "tests/program/zoo.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

// Names of the weights that have been loaded.
std::vector<std::string> loaded_weights(const Program& program) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state_of(program).weights->by_name()) {
    if (state_of(program).weights->is_loaded(tensor)) names.push_back(name);
  }
  return names;
}

class Loading : public ::testing::Test {
 protected:
  // Returns a copy of a program of the zoo, which a test may damage.
  std::string copy_of(const std::string& model) const {
    const std::string path = folder / "model.pt2";
    std::filesystem::copy_file(zoo_model(model).path(".pt2"), path, std::filesystem::copy_options::overwrite_existing);
    return path;
  }

  Folder folder;
};

TEST_F(Loading, ReadsTheWeightsOfTheStagesThatAreBuilt) {
  const Program program(copy_of("mlp"));
  const Pipe pipe = pipeline(program, 2);
  EXPECT_FALSE(pipe.info().stages.empty());
  EXPECT_EQ(loaded_weights(program), std::vector<std::string>{});
  const std::array stages{1};
  const StagedModel model = pipe.build_stages(stages);
  std::vector<std::string> names;
  for (const auto& [name, parameter] : model.stages()[0].module().parameters) names.push_back(name);
  std::ranges::sort(names);
  EXPECT_FALSE(names.empty());
  EXPECT_EQ(loaded_weights(program), names);
  EXPECT_GT(program.parameters().size(), names.size());
  EXPECT_EQ(loaded_weights(program).size(), state_of(program).weights->by_name().size());
}

TEST_F(Loading, GivesTheSameTensorsAsReadingAllAtOnce) {
  for (const char* model : {"gpt", "mlp", "resnet", "moe"}) {
    std::ifstream file(zoo_model(model).path(".pt2"), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const Program whole = Program::from_bytes(bytes, model);
    const Pipe expected = pipeline(whole, 2);
    const Pipe pipe = pipeline(Program(zoo_model(model).path(".pt2")), 2);
    for (int stage = 1; stage >= 0; --stage) {
      const NamedTensors found = pipe.state_dict(stage);
      const NamedTensors wanted = expected.state_dict(stage);
      ASSERT_EQ(found.size(), wanted.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i].first, wanted[i].first);
        EXPECT_TRUE(same_bits(found[i].second, wanted[i].second)) << found[i].first;
        EXPECT_EQ(found[i].second.requires_grad(), wanted[i].second.requires_grad());
      }
    }
  }
}

TEST_F(Loading, CopiesSharedParametersForEachStage) {
  const Pipe pipe = pipeline(Program(copy_of("gpt")), 2);
  ASSERT_EQ(pipe.shared_parameters().size(), 1U);
  const SharedParameter& first = pipe.shared_parameters()[0][0];
  const SharedParameter& second = pipe.shared_parameters()[0][1];
  const auto find = [&](const SharedParameter& place) {
    for (const auto& [name, tensor] : pipe.get_stage_module(place.stage).parameters) {
      if (name == place.name) return tensor;
    }
    return at::Tensor();
  };
  const at::Tensor copy = find(second);
  const at::Tensor original = find(first);
  EXPECT_TRUE(same_bits(original, copy));
  EXPECT_FALSE(original.is_alias_of(copy));
}

TEST_F(Loading, UsesGivenWeightsInPlaceOfThoseOfTheFile) {
  Program program(copy_of("gpt"));
  NamedTensors state;
  for (const auto& [name, tensor] : zoo_model("gpt").program().state_dict())
    state.emplace_back(name, tensor.detach() * 2);
  program.load_state_dict(state, "state", Program::CopyWhen::WhenUsed);
  const Pipe pipe = pipeline(program, 2);
  EXPECT_EQ(loaded_weights(program), std::vector<std::string>{});
  for (int stage = 0; stage < 2; ++stage) {
    for (const auto& [name, tensor] : pipe.state_dict(stage)) {
      for (const auto& [given, values] : state) {
        if (given != name) continue;
        EXPECT_TRUE(same_bits(values, tensor.detach())) << name;
      }
    }
  }
}

TEST_F(Loading, NeedsTheFileNoLongerForWhatWasLoaded) {
  const std::string path = copy_of("mlp");
  const Program program(path);
  const NamedTensors before = Program(path).state_dict();
  program.parameters();
  program.buffers();
  // Overwritten in place, as torch.export.save does.
  std::ofstream(path, std::ios::binary | std::ios::in) << std::string(std::filesystem::file_size(path), 'x');
  const NamedTensors after = program.state_dict();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i].second, after[i].second));
}

TEST_F(Loading, NamesADamagedRecordWhenItIsLoaded) {
  const std::string path = copy_of("mlp");
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  for (const ZipRecord& record : read_zip_directory(bytes)) {
    if (!record.name.ends_with("data/weights/weight_0")) continue;
    std::fstream damaged(path, std::ios::binary | std::ios::in | std::ios::out);
    damaged.seekp(static_cast<std::streamoff>(record.begin));
    damaged.put(static_cast<char>(bytes[record.begin] ^ 1));
  }
  const Program program(path);
  EXPECT_EQ(message_of<ProgramError>([&] { program.parameters(); }),
            path + ": data/weights/weight_0 is damaged: its checksum is wrong.");
  EXPECT_EQ(message_of<ProgramError>([&] { program.run({at::zeros({2, 8})}); }).substr(0, path.size()), path);
}

// Shards free the memory of a weight and allocate it again.
TEST_F(Loading, TakesWeightsThatAreSharded) {
  const ZooModel model = zoo_model("mlp");
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  const Schedule plain = generate("GPipe", {.ranks = 2, .microbatches = model.microbatches / 2});
  const auto losses_of = [&](const Schedule& schedule, bool sharded) {
    std::vector<StagedModel> replicas;
    for (int i = 0; i < 2; ++i) replicas.push_back(pipeline(Program(model.path(".pt2")), 2).build());
    PipelineOptions options = step_options();
    options.sharded = sharded;
    Pipeline trained(std::move(replicas), schedule, options);
    const Arguments batch = arguments_from(model.program(), inputs);
    std::vector<at::Tensor> losses;
    for (int step = 0; step < 2; ++step) {
      for (const at::Tensor& loss : trained.step(batch.args, batch.kwargs, at::Tensor()).losses) losses.push_back(loss);
      const at::NoGradGuard no_grad;
      for (int replica = 0; replica < 2; ++replica) {
        for (const PipelineStage& stage : trained.stages(replica)) {
          for (const auto& [name, parameter] : stage.parameters()) parameter.sub_(parameter.grad(), 0.1);
        }
      }
    }
    return at::stack(losses);
  };
  const at::Tensor expected = losses_of(plain, /*sharded=*/false);
  EXPECT_TRUE(at::allclose(losses_of(plain, /*sharded=*/true), expected));
  EXPECT_TRUE(at::allclose(losses_of(add_recomputation(plain), /*sharded=*/true), expected));
}

TEST_F(Loading, TellsTheMetadataOfWeightsWithoutLoadingThem) {
  const Program program(copy_of("gpt"));
  const std::vector<WeightInfo> weights = program.weights();
  EXPECT_EQ(loaded_weights(program), std::vector<std::string>{});
  const NamedTensors parameters = program.parameters();
  std::size_t named = 0;
  for (const WeightInfo& weight : weights) {
    if (!weight.is_parameter) continue;
    for (const std::string& name : weight.names) {
      const auto found = std::ranges::find(parameters, name, &NamedTensors::value_type::first);
      ASSERT_NE(found, parameters.end());
      EXPECT_EQ(found->second.sizes().vec(), weight.sizes);
      EXPECT_EQ(found->second.scalar_type(), weight.dtype);
      EXPECT_EQ(found->second.numel(), weight.numel());
      ++named;
    }
  }
  EXPECT_EQ(named, parameters.size());
}

}  // namespace
}  // namespace penstock::internal::testing
