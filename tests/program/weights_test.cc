// Reading of weights from untrusted sources.
#include "penstock/program/reader/weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/program/program.h"
#include "penstock/program/reader/archive.h"
#include "tests/program/refused.h"
#include "tests/program/tensor_bytes.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

namespace {

TEST(Reading, NamesAWeightThatIsMissing) {
  json weights = small_weights();
  weights["config"].erase("layer.bias");
  expect_error<ProgramError>([&] { read(small_records(small_model(), weights)); },
                             "small: there is no tensor for 'layer.bias' in the archive.");
  std::vector<Record> records = small_records();
  find(records, "data/weights/weight_1")->name = "data/weights/weight_7";
  expect_records_refused(records, "'layer.bias': small: has no record data/weights/weight_1.");
  records = small_records();
  find(records, "data/weights/model_weights_config.json")->name = "data/weights/other.json";
  expect_records_refused(records, "small: there is no tensor for 'layer.weight' in the archive.");
}

TEST(Reading, RefusesAWeightOutsideOfItsFile) {
  const std::string outside = ", 'layer.bias': is not inside the 16 bytes of weight_1.";
  const auto with_bias = [](const std::function<void(json&)>& change) {
    json weights = small_weights();
    change(weights["config"]["layer.bias"]["tensor_meta"]);
    return weights;
  };
  const auto number = [](std::int64_t value) { return json{{"as_int", value}}; };
  const std::int64_t huge = std::int64_t{1} << 62;
  expect_weights_refused(with_bias([&](json& meta) { meta["sizes"][0] = number(5); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["sizes"][0] = number(huge); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["sizes"][0] = number(-1); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["strides"][0] = number(2); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["strides"][0] = number(-1); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["strides"][0] = number(huge); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["strides"] = json::array(); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["storage_offset"] = number(1); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["storage_offset"] = number(-1); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["storage_offset"] = number(huge); }), outside);
  expect_weights_refused(with_bias([&](json& meta) { meta["dtype"] = 8; }), outside);
  // The product of the sizes overflows to a small number.
  expect_weights_refused(with_bias([&](json& meta) {
                           meta["sizes"] = {number(huge), number(4)};
                           meta["strides"] = {number(4), number(1)};
                         }),
                         outside);
  // A tensor without elements fits anywhere.
  EXPECT_NO_THROW(read(small_records(small_model(), with_bias([&](json& meta) { meta["sizes"][0] = number(0); }))));
}

TEST(Reading, RefusesEmptyWeightsWithImpossibleSizes) {
  json weights = small_weights();
  json& meta = weights["config"]["layer.bias"]["tensor_meta"];
  meta["sizes"] = {{{"as_int", 0}}, {{"as_int", -4}}};
  meta["strides"] = {{{"as_int", 1}}, {{"as_int", 1}}};
  expect_weights_refused(weights, ", 'layer.bias': ");
}

TEST(Reading, RefusesAWeightThatIsPickled) {
  json weights = small_weights();
  weights["config"]["layer.bias"]["use_pickle"] = true;
  expect_weights_refused(weights,
                         ", 'layer.bias': is a pickled Python object, which could run code when it is loaded; only "
                         "plain tensors are supported.");
  weights = small_weights();
  weights["config"]["layer.bias"]["tensor_meta"] = nullptr;
  expect_weights_refused(weights, ", 'layer.bias': is a pickled Python object, which could run code");
}

TEST(Reading, RefusesCodesThatThereAreNot) {
  for (const int code : {0, 22, 99, -1}) {
    const std::string words = "there is no dtype with code " + std::to_string(code) + ".";
    json weights = small_weights();
    weights["config"]["layer.bias"]["tensor_meta"]["dtype"] = code;
    expect_weights_refused(weights, ", 'layer.bias': " + words);
    json model = small_model();
    graph_of(model)["tensor_values"]["x"]["dtype"] = code;
    expect_model_refused(model, ": value 'x': " + words);
    model = small_model();
    nodes_of(model)[1] = node("relu", "torch.ops.aten.to.dtype",
                              {{"self", tensor_argument("linear")}, {"dtype", {{"as_scalar_type", code}}}},
                              json::array({tensor_argument("relu")}));
    expect_model_refused(model, ": node 1 'relu': " + words);
  }
  json weights = small_weights();
  weights["config"]["layer.bias"]["tensor_meta"]["layout"] = 77;
  expect_weights_refused(weights, ", 'layer.bias': there is no layout with code 77.");
  weights["config"]["layer.bias"]["tensor_meta"]["layout"] = 1;
  expect_weights_refused(weights, ", 'layer.bias': is not a strided tensor.");
  json model = small_model();
  graph_of(model)["tensor_values"]["x"]["device"]["type"] = "abacus";
  expect_model_refused(model, ": value 'x': there is no device 'abacus'.");
  model = small_model();
  graph_of(model)["tensor_values"]["x"]["sizes"][0]["as_int"] = -2;
  expect_model_refused(model, ": value 'x': a tensor has a negative size.");
}

TEST(Reading, RefusesAWeightWithAnOpenSize) {
  json weights = small_weights();
  weights["config"]["layer.bias"]["tensor_meta"]["sizes"][0] = {{"as_expr", {{"expr_str", "s7"}, {"hint", nullptr}}}};
  expect_weights_refused(weights, ", 'layer.bias': found the size s7, expected a static one.");
}

TEST(Reading, GivesWeightsThatAreOneTensorUnderAllNames) {
  json weights = small_weights();
  weights["config"]["again"] = weights["config"]["layer.bias"];
  weights["config"]["part"] = weights["config"]["layer.bias"];
  weights["config"]["part"]["tensor_meta"]["sizes"][0]["as_int"] = 2;
  weights["config"]["part"]["tensor_meta"]["storage_offset"]["as_int"] = 1;
  weights["config"]["part"]["tensor_meta"]["requires_grad"] = false;
  const std::string bytes = zipped(small_records(small_model(), weights));
  const Weights read_weights(std::make_shared<const Archive>(bytes, "small"));
  const std::map<std::string, at::Tensor>& read = read_weights.by_name();
  EXPECT_TRUE(read.at("again").is_same(read.at("layer.bias")));
  EXPECT_TRUE(read.at("part").is_alias_of(read.at("layer.bias")));
  EXPECT_TRUE(same(at::arange(1, 3, at::kFloat), read.at("part")));
  EXPECT_TRUE(read.at("layer.bias").requires_grad());
}

}  // namespace
}  // namespace penstock::internal::testing
