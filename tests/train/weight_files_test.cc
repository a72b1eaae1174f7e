// Weights that are read from files of other runs and programs.
#include "penstock/train/weight_files.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint_writer.h"
#include "penstock/train/model.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const at::Tensor kFirst = counting({2, 2});
const at::Tensor kSecond = counting({3});

void expect_both(const std::string& path) {
  const WeightFiles files = read_weight_files(path);
  ASSERT_EQ(files.tensors.size(), 2U) << path;
  EXPECT_TRUE(same(kFirst, files.tensors.at("first")));
  EXPECT_TRUE(same(kSecond, files.tensors.at("second")));
}

void write_index(const Folder& folder, const json& index) {
  folder.write("model.safetensors.index.json", index.dump());
}

TEST(WeightFiles, AreAFileOrAHuggingFaceDirectory) {
  const Folder folder;
  write_safetensors(folder / "model.safetensors", {{"first", kFirst}, {"second", kSecond}});
  expect_both(folder / "model.safetensors");
  expect_both(folder.path().string());
  EXPECT_FALSE(read_weight_files(folder.path().string()).checkpoint);
}

TEST(WeightFiles, AreTheShardsOfAnIndex) {
  const Folder folder;
  write_safetensors(folder / "model-1.safetensors", {{"first", kFirst}});
  write_safetensors(folder / "model-2.safetensors", {{"second", kSecond}, {"not listed", kFirst}});
  write_index(folder, {{"weight_map", {{"first", "model-1.safetensors"}, {"second", "model-2.safetensors"}}}});
  expect_both(folder.path().string());
}

TEST(WeightFiles, AreTheLastCheckpoint) {
  const Folder folder;
  for (const std::int64_t step : {5, 10}) {
    const CheckpointWriter writer(folder.path().string(), step);
    writer.begin();
    writer.write_part(0, {{"first", kFirst + (10 - step)}}, {{"first.step", at::scalar_tensor(step, at::kLong)}});
    writer.write_part(1, {{"second", kSecond}}, {});
    writer.finish({.step = step, .model = "a model", .non_persistent_buffers = {"second"}}, 2, /*keep=*/3);
  }
  expect_both(folder.path().string());
  expect_both(folder / "step-00000010");
  const WeightFiles files = read_weight_files(folder.path().string());
  EXPECT_EQ(files.path, folder / "step-00000010");
  ASSERT_TRUE(files.checkpoint);
  EXPECT_EQ(files.checkpoint->step, 10);
  EXPECT_EQ(files.checkpoint->non_persistent_buffers, std::vector<std::string>{"second"});
}

TEST(WeightFiles, SayWhatIsWrongWithThem) {
  const Folder folder;
  const std::string path = folder.path().string();
  const std::string index = folder / "model.safetensors.index.json";
  expect_error<WeightsError>([&] { read_weight_files(folder / "none"); },
                             folder / "none" + ": there is no such file or directory.");
  expect_error<WeightsError>([&] { read_weight_files(path); },
                             path +
                                 ": has no weights: neither a checkpoint of Penstock, nor model.safetensors or "
                                 "model.safetensors.index.json.\n  Hint: in Python, "
                                 "model.save_pretrained(DIRECTORY) or safetensors.torch.save_file writes them.");
  expect_error<WeightsError>([&] { read_weight_files(folder.write("text", "short")); },
                             folder / "text" + ": is 5 bytes long; a safetensors file has at least 8.");
  const std::string no_index =
      index + ": is not an index of weights: expected JSON with a \"weight_map\" from tensor names to file names.";
  for (const std::string text : {"{", "[]", "{}", R"({"weight_map": []})"}) {
    folder.write("model.safetensors.index.json", text);
    expect_error<WeightsError>([&] { read_weight_files(path); }, no_index);
  }
  for (const json& file : {json("../model.safetensors"), json("/model.safetensors"), json(""), json(1)}) {
    write_index(folder, {{"weight_map", {{"first", file}}}});
    expect_error<WeightsError>(
        [&] { read_weight_files(path); },
        index + ": tensor 'first' should be in a file of the same directory; found " + file.dump() + ".");
  }
  write_index(folder, {{"weight_map", {{"first", "model-1.safetensors"}}}});
  expect_error<WeightsError>([&] { read_weight_files(path); },
                             folder / "model-1.safetensors" + ": could not be opened: No such file or directory.");
  write_safetensors(folder / "model-1.safetensors", {{"second", kSecond}});
  expect_error<WeightsError>([&] { read_weight_files(path); },
                             index + ": tensor 'first' is not in model-1.safetensors, which the index names for it.");
}

TEST(GptModel, StartsFromTheWeightsThatItIsGiven) {
  const GptOptions options{.layers = 2, .width = 8, .heads = 2, .length = 4};
  WeightFiles weights{.path = "other"};
  const PipelineStage whole = gpt_model(options, /*seed=*/7, 1)->build_stage(0);
  for (const auto& [name, tensor] : whole.parameters()) {
    weights.tensors.emplace(name, tensor.detach().clone());
  }
  for (const int stages : {1, 3}) {
    const auto model = gpt_model(options, /*seed=*/0, stages, weights);
    for (int i = 0; i < stages; ++i) {
      const PipelineStage stage = model->build_stage(i);
      for (const auto& [name, tensor] : stage.parameters()) {
        EXPECT_TRUE(same(weights.tensors.at(name), tensor.detach())) << name;
        EXPECT_TRUE(tensor.requires_grad()) << name;
      }
    }
  }
  weights.tensors.erase("head.bias");
  expect_error<WeightsError>([&] { gpt_model(options, 0, 1, weights); },
                             "other: does not fit the GPT, 2 layers of width 8 with 2 heads, texts of 4 bytes:\n"
                             "  tensor 'head.bias' is missing: the model has float32[256].");
}

}  // namespace
}  // namespace penstock::internal::testing
