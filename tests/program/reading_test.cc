// Exports that may come from anybody: each is read as it was written, or refused with what is wrong in it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/program/exported.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/program/pytree.h"
#include "tests/program/refused.h"
#include "tests/program/tensor_bytes.h"
#include "tests/tensor/values.h"

namespace penstock::testing {
namespace {

namespace fs = std::filesystem;

TEST(Reading, TouchesNothingOnTheDisk) {
  const Folder folder;
  const std::string path = folder.write("model.pt2", zipped(small_records()));
  std::vector<Record> damaged = small_records();
  find(damaged, "data/weights/weight_1")->claimed_size = 10'000;
  const std::string other = folder.write("damaged.pt2", zipped(damaged));
  const auto when = fs::last_write_time(path);
  const fs::path before = fs::current_path();
  const char* const temporary = std::getenv("TMPDIR");
  const std::string temporary_before = temporary == nullptr ? "" : temporary;
  fs::current_path(folder.path());
  ::setenv("TMPDIR", folder.path().c_str(), 1);
  // Whoever writes to a file is stopped by a signal.
  struct ::rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const struct ::rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  bool refused = false;
  {
    const Program program(path);
    program.run({at::ones({2, 3})});
    try {
      const Program second(other);
    } catch (const ProgramError&) {
      refused = true;
    }
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  fs::current_path(before);
  temporary == nullptr ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", temporary_before.c_str(), 1);
  EXPECT_TRUE(refused);
  EXPECT_EQ(folder.files(), 2U);
  EXPECT_EQ(fs::last_write_time(path), when);
  EXPECT_EQ(read_file(path), zipped(small_records()));
}

TEST(Reading, WantsOneModel) {
  std::vector<Record> records = small_records();
  find(records, "models/model.json")->name = "models/model.txt";
  expect_error<ProgramError>([&] { read(records); },
                             "small: has no program: there is no record models/*.json in it.\n  Hint: a .pt2 is what "
                             "torch.export.save of PyTorch 2.8 or later writes.");
  find(records, "models/model.txt")->name = "models/one.json";
  records.push_back({.name = "models/two.json", .bytes = small_model().dump()});
  expect_error<ProgramError>([&] { read(records); },
                             "small: has several programs (one, two), and none is called 'model'.");
  records.push_back({.name = "models/model.json", .bytes = small_model().dump()});
  EXPECT_NO_THROW(read(records));
}

TEST(Reading, FindsTheWeightsOfAModelWithAnotherName) {
  std::vector<Record> records = small_records();
  find(records, "models/model.json")->name = "models/gpt.json";
  expect_records_refused(records, "small: there is no tensor for 'layer.weight' in the archive.");
  find(records, "data/weights/model_weights_config.json")->name = "data/weights/gpt_weights_config.json";
  EXPECT_EQ(read(records).parameters().size(), 2U);
}

TEST(Reading, WantsItsVersionOfTheSchema) {
  json model = small_model();
  model["schema_version"]["major"] = 9;
  expect_error<ProgramError>([&] { read(small_records(model)); },
                             "small: models/model.json: is of schema version 9; version 8 can be read.\n  Hint: export "
                             "the model with PyTorch 2.13.");
  for (const json& version : {json(), json(8), json::object(), json{{"major", "8"}}, json{{"major", nullptr}}}) {
    model["schema_version"] = version;
    expect_model_refused(model, ": has no schema_version.");
  }
  model.erase("schema_version");
  expect_model_refused(model, ": has no schema_version.");
  model = small_model();
  model["schema_version"]["minor"] = 999;
  EXPECT_NO_THROW(read(small_records(model)));
}

TEST(Reading, WantsItsOrderOfBytes) {
  std::vector<Record> records = small_records();
  find(records, "byteorder")->bytes = "big";
  expect_records_refused(records, "small: was written on a machine with another order of bytes.");
}

TEST(Reading, WantsJson) {
  std::vector<Record> records = small_records();
  Record* const model = find(records, "models/model.json");
  for (const std::string text : {"", "{", "nonsense", "{\"a\": 1,}", "\xff\xfe"}) {
    model->bytes = text;
    expect_records_refused(records, "small: models/model.json: is not JSON: ");
  }
  for (const std::string text : {"[]", "8", "\"model\"", "null"}) {
    model->bytes = text;
    expect_records_refused(records, "small: models/model.json: should be an object.");
  }
  model->bytes = "{}";
  expect_records_refused(records, "small: models/model.json: has no schema_version.");
  model->bytes = R"({"schema_version": {"major": 8}})";
  expect_records_refused(records, "small: models/model.json: is not as the schema has it: ");
}

TEST(Reading, WantsJsonOfTheWeightsToo) {
  std::vector<Record> records = small_records();
  Record* const weights = find(records, "data/weights/model_weights_config.json");
  weights->bytes = "{";
  expect_records_refused(records, "small: data/weights/model_weights_config.json: is not JSON: ");
  for (const std::string text : {"{}", "[]", "null", R"({"config": []})"}) {
    weights->bytes = text;
    expect_records_refused(records, "small: data/weights/model_weights_config.json: should have a config.");
  }
}

TEST(Reading, RefusesWhatIsNestedTooDeep) {
  constexpr std::size_t kDeep = 100'000;
  const std::string deep = std::string(kDeep, '[') + std::string(kDeep, ']');
  std::string objects;
  for (std::size_t i = 0; i < kDeep; ++i) objects += "{\"a\":";
  for (const std::string& text :
       {deep, objects, "{\"schema_version\": {\"major\": 8}, \"graph_module\": " + deep + "}"}) {
    std::vector<Record> records = small_records();
    find(records, "models/model.json")->bytes = text;
    expect_records_refused(records, "small: models/model.json: is nested more than 512 deep.");
    records = small_records();
    find(records, "data/weights/model_weights_config.json")->bytes = text;
    expect_records_refused(records, "small: data/weights/model_weights_config.json: is nested more than 512 deep.");
  }
  // JSON in a text in JSON, and in that again.
  json model = small_model();
  json& in_spec = model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"];
  in_spec = deep;
  expect_model_refused(model, ", the structure of the inputs: is nested more than 512 deep.");
  in_spec = json::array({1, {{"type", "builtins.dict"}, {"context", deep}, {"children_spec", json::array()}}}).dump();
  expect_model_refused(model, ", the structure of the inputs: is nested more than 512 deep.");
}

TEST(Reading, RefusesAHundredMegabytesOfBrackets) {
  std::vector<Record> records = small_records();
  find(records, "models/model.json")->bytes.assign(100'000'000, '[');
  expect_records_refused(records, "small: models/model.json: is nested more than 512 deep.");
}

json& graph_of(json& model) {
  return model["graph_module"]["graph"];
}
json& nodes_of(json& model) {
  return graph_of(model)["nodes"];
}

TEST(Reading, NamesAValueThatIsUsedBeforeItIsMade) {
  json model = small_model();
  std::swap(nodes_of(model)[0], nodes_of(model)[1]);
  expect_error<ProgramError>([&] { read(small_records(model)); },
                             "small: models/model.json: node 0 'relu': uses 'linear', which nothing before it makes.");
}

TEST(Reading, RefusesACycle) {
  json model = small_model();
  nodes_of(model)[0]["inputs"][0]["arg"] = tensor_argument("relu");
  expect_model_refused(model, ": node 0 'linear': uses 'relu', which nothing before it makes.");
  // Of one node.
  nodes_of(model)[0]["inputs"][0]["arg"] = tensor_argument("linear");
  expect_model_refused(model, ": node 0 'linear': uses 'linear', which nothing before it makes.");
}

TEST(Reading, NamesAnOutputThatNothingMakes) {
  json model = small_model();
  model["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"] = tensor_argument("nothing");
  expect_model_refused(model, ": output 0: uses 'nothing', which nothing before it makes.");
}

TEST(Reading, RefusesTwoValuesOfOneName) {
  json model = small_model();
  nodes_of(model)[1]["outputs"][0] = tensor_argument("linear");
  expect_error<ProgramError>([&] { read(small_records(model)); },
                             "small: models/model.json: node 1 'relu': there are two values 'linear'.");
  model = small_model();
  nodes_of(model)[0]["outputs"][0] = tensor_argument("x");
  expect_model_refused(model, ": node 0 'linear': there are two values 'x'.");
  model = small_model();
  graph_of(model)["inputs"][2] = tensor_argument("p_bias");
  model["graph_module"]["signature"]["input_specs"][2]["user_input"]["arg"] = tensor_argument("p_bias");
  expect_model_refused(model, ": input 2: there are two values 'p_bias'.");
}

TEST(Reading, RefusesASecondNameForWhatIsWrittenInPlaceThatIsTakenAlready) {
  json model = small_model();
  nodes_of(model)[1] = node("relu_", "torch.ops.aten.relu_.default", {{"self", tensor_argument("linear")}},
                            json::array({tensor_argument("x")}));
  nodes_of(model).push_back(node("relu", "torch.ops.aten.relu.default", {{"self", tensor_argument("x")}},
                                 json::array({tensor_argument("relu")})));
  expect_model_refused(model, ": node 1 'relu_': there are two values 'x'.");
}

TEST(Reading, RefusesTwoParametersOfOneName) {
  json model = small_model();
  model["graph_module"]["signature"]["input_specs"][1]["parameter"]["parameter_name"] = "layer.weight";
  expect_model_refused(model, ": input 1: ");
}

TEST(PythonsArchive, NamesAnOperatorThatThereIsNotWithItsModule) {
  expect_refused(
      [] { exported("strange"); },
      "strange.pt2: models/model.json: node 1 'twice': node 'twice' (torch.ops.strange.twice.default) of "
      "module 'inner.odd' (__main__.Strange.Odd): there is no such operator in this process.\n  Hint: an "
      "operator of another library is there once that is loaded; one of another version of PyTorch has to be "
      "exported with 2.13.");
}

TEST(Reading, NamesAnOperatorThatThereIsNotWithItsModule) {
  for (const std::string target : {"torch.ops.aten.nothing.default", "torch.ops.aten.relu.nothing", "torch.ops.aten",
                                   "torch.ops..", "math.nonsense", "relu", "", "torch.ops.aten.relu.default.more"}) {
    json model = small_model();
    nodes_of(model)[1]["target"] = target;
    expect_model_refused(model, ": node 1 'relu': node 'relu' (" + target +
                                    ") of module 'layer' (torch.nn.modules.linear.Linear): there is no such operator");
  }
}

TEST(PythonsArchive, NamesAHigherOrderOperatorThatCannotBeRun) {
  expect_refused([] { exported("cond"); },
                 "cond.pt2: models/model.json: node 2 'cond': node 'cond' (torch.ops.higher_order.cond) of module "
                 "'choice' (__main__.Cond.Choice): is a higher-order operator, of which regions of grad mode and of "
                 "autocast can be run.");
}

const std::string kRelu =
    ": node 1 'relu': node 'relu' (torch.ops.aten.relu.default) of module 'layer' (torch.nn.modules.linear.Linear): ";

TEST(Reading, RefusesArgumentsOfOtherTypes) {
  struct Case {
    std::string target;
    std::string argument;
    json given;
    std::string type;
  };
  const json ints = {{"as_ints", {1, 2}}};
  const json words = {{"as_strings", {"a", "b"}}};
  const std::vector<Case> cases = {
      {"relu.default", "self", {{"as_string", "x"}}, "Tensor"},
      {"relu.default", "self", ints, "Tensor"},
      {"relu.default", "self", {{"as_none", true}}, "Tensor"},
      {"relu.default", "self", {{"as_tensors", {{{"name", "linear"}}}}}, "Tensor"},
      {"softmax.int", "dim", {{"as_float", 1.0}}, "int"},
      {"softmax.int", "dim", {{"as_string", "1"}}, "int"},
      {"softmax.int", "dim", tensor_argument("linear"), "int"},
      {"softmax.int", "dim", {{"as_none", true}}, "int"},
      {"softmax.int", "dim", ints, "int"},
      {"dropout.default", "p", {{"as_string", "0.5"}}, "float"},
      {"dropout.default", "p", tensor_argument("linear"), "float"},
      {"dropout.default", "train", {{"as_int", 1}}, "bool"},
      {"sum.dim_IntList", "dim", words, "int[]?"},
      {"sum.dim_IntList", "dim", {{"as_floats", {1.0}}}, "int[]?"},
      {"sum.dim_IntList", "dim", tensor_argument("linear"), "int[]?"},
      {"sum.dim_IntList", "dtype", {{"as_string", "float32"}}, "int?"},
      {"cat.default", "tensors", ints, "Tensor[]"},
      {"cat.default", "tensors", words, "Tensor[]"},
      {"cat.default", "tensors", {{"as_int", 1}}, "Tensor[]"},
      {"view.default", "size", words, "int[]"},
      {"view.default", "size", {{"as_tensors", {{{"name", "linear"}}}}}, "int[]"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.target + ", " + one.argument + ": " + one.given.dump());
    json model = small_model();
    std::vector<std::pair<std::string, json>> inputs;
    if (one.argument != "self" && one.argument != "tensors") {
      inputs.emplace_back(one.target == "dropout.default" ? "input" : "self", tensor_argument("linear"));
    }
    if (one.argument == "train") inputs.emplace_back("p", json{{"as_float", 0.5}});
    inputs.emplace_back(one.argument, one.given);
    if (one.argument == "p") inputs.emplace_back("train", json{{"as_bool", true}});
    nodes_of(model)[1] = node("relu", "torch.ops.aten." + one.target, inputs, json::array({tensor_argument("relu")}));
    expect_model_refused(model, ": node 1 'relu': node 'relu' (torch.ops.aten." + one.target +
                                    ") of module 'layer' (torch.nn.modules.linear.Linear): its argument '" +
                                    one.argument + "' should be " + one.type);
  }
}

TEST(Reading, RefusesArgumentsThatAreMissingOrTooMany) {
  json model = small_model();
  nodes_of(model)[1]["inputs"] = json::array();
  expect_model_refused(model, kRelu + "its argument 'self' is missing.");
  model = small_model();
  nodes_of(model)[1]["inputs"].push_back({{"name", "more"}, {"arg", tensor_argument("x")}, {"kind", 1}});
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument 'more' at this place.");
  nodes_of(model)[1]["inputs"][1]["name"] = "self";
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument 'self' at this place.");
  nodes_of(model)[1]["inputs"][1]["name"] = "";
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument '' at this place.");
}

TEST(Reading, RefusesResultsThatAnOperatorDoesNotGive) {
  json model = small_model();
  nodes_of(model)[1]["outputs"].push_back(tensor_argument("more"));
  expect_model_refused(model, kRelu + "has 2 results, and the operator gives 1.");
  nodes_of(model)[1]["outputs"] = json::array({{{"as_tensors", {{{"name", "relu"}}}}}});
  expect_model_refused(model, kRelu + "its result 0 should be Tensor.");
  nodes_of(model)[1]["outputs"] = json::array({{{"as_string", "relu"}}});
  expect_model_refused(model, ": node 1 'relu': gives something of a kind that cannot be read.");
}

TEST(Reading, RefusesArithmeticThatGivesSomethingElse) {
  json model = small_model();
  nodes_of(model).push_back(node("sum", "_operator.add", {{"", {{"as_int", 1}}}, {"", {{"as_int", 2}}}},
                                 json::array({json{{"as_sym_ints", {{{"as_name", "sum"}}}}}})));
  expect_model_refused(model,
                       ": node 2 'sum': node 'sum' (_operator.add) of module 'layer' (torch.nn.modules.linear.Linear): "
                       "arithmetic gives one number.");
}

TEST(Reading, RefusesKindsThatItDoesNotKnow) {
  const json unknown = {{"as_something_new", 1}};
  json model = small_model();
  nodes_of(model)[1]["inputs"][0]["arg"] = unknown;
  expect_model_refused(model, ": node 1 'relu': takes something of an unknown kind.");
  // Of an argument that may be None.
  model = small_model();
  nodes_of(model)[0]["inputs"][2]["arg"] = unknown;
  expect_model_refused(model, ": node 0 'linear': takes something of an unknown kind.");
  model = small_model();
  model["graph_module"]["signature"]["output_specs"][0] = {{"something_new", json::object()}};
  expect_model_refused(model, ": output 0: is of an unknown kind.");
  model = small_model();
  model["graph_module"]["signature"]["input_specs"][0] = {{"something_new", json::object()}};
  expect_model_refused(model, ": input 0: is of an unknown kind.");
}

TEST(Reading, RefusesSizesOfAKindThatItDoesNotKnow) {
  json model = small_model();
  graph_of(model)["tensor_values"]["x"]["sizes"][0] = {{"as_something_new", 1}};
  expect_model_refused(model, ": value 'x': ");
  json weights = small_weights();
  weights["config"]["layer.bias"]["tensor_meta"]["sizes"][0] = json::object();
  expect_weights_refused(weights, ", 'layer.bias': ");
}

TEST(Reading, RefusesWhatOnlyPythonCanRun) {
  const auto with_input = [](const json& spec) {
    json model = small_model();
    model["graph_module"]["signature"]["input_specs"][0] = spec;
    return model;
  };
  const auto with_output = [](const json& spec) {
    json model = small_model();
    model["graph_module"]["signature"]["output_specs"][0] = spec;
    return model;
  };
  const auto with_argument = [](const json& argument) {
    json model = small_model();
    nodes_of(model)[1]["inputs"][0]["arg"] = argument;
    return model;
  };
  expect_model_refused(
      with_input(
          {{"custom_obj", {{"arg", {{"name", "p_weight"}, {"class_fqn", "a.B"}}}, {"custom_obj_name", "tokenizer"}}}}),
      ": input 0: is the object 'tokenizer' of a class of Python's or TorchScript's, which cannot be read.");
  expect_model_refused(with_input({{"token", {{"arg", {{"name", "p_weight"}}}}}}),
                       ": input 0: is a token of an operator with side effects, which cannot be run.");
  expect_model_refused(with_output({{"token", {{"arg", {{"name", "relu"}}}}}}),
                       ": output 0: is a token of an operator with side effects, which cannot be run.");
  const json gradient = {{"arg", {{"name", "relu"}}}, {"parameter_name", "layer.weight"}};
  expect_model_refused(
      with_output({{"gradient_to_parameter", gradient}}),
      ": output 0: is a gradient: the program has its backward in it.\n  Hint: export the forward alone; its "
      "gradients are computed here.");
  expect_model_refused(with_argument({{"as_custom_obj", {{"name", "it"}, {"class_fqn", "a.B"}}}}),
                       ": node 1 'relu': takes the object 'it', which cannot be read.");
  expect_model_refused(with_argument({{"as_operator", "torch.ops.aten.relu"}}),
                       ": node 1 'relu': takes the operator 'torch.ops.aten.relu' as a value.");
  expect_model_refused(with_argument({{"as_nested_tensors", json::array()}}),
                       ": node 1 'relu': takes lists of lists of tensors.");
  expect_model_refused(with_argument({{"as_int_lists", json::array()}}),
                       ": node 1 'relu': takes lists of lists of numbers.");
  expect_model_refused(with_argument({{"as_string_to_argument", json::object()}}), ": node 1 'relu': takes a dict.");
}

TEST(Reading, RefusesWritesToWhatThereIsNot) {
  json model = small_model();
  json& outputs = model["graph_module"]["signature"]["output_specs"];
  outputs.push_back({{"buffer_mutation", {{"arg", {{"name", "relu"}}}, {"buffer_name", "layer.weight"}}}});
  expect_model_refused(model, ": output 1: is written to 'layer.weight', which there is not.");
  outputs[1] = {{"parameter_mutation", {{"arg", {{"name", "relu"}}}, {"parameter_name", "bias"}}}};
  expect_model_refused(model, ": output 1: is written to 'bias', which there is not.");
  outputs[1] = {{"user_input_mutation", {{"arg", {{"name", "relu"}}}, {"user_input_name", "linear"}}}};
  expect_model_refused(model, ": output 1: is written to 'linear', which is no input.");
}

TEST(Reading, WantsAsManyInputsInAllPlaces) {
  json model = small_model();
  graph_of(model)["inputs"].erase(2);
  expect_model_refused(model, ": input 2: is in the signature, and not in the graph.");
  model = small_model();
  graph_of(model)["inputs"].push_back(tensor_argument("y"));
  expect_model_refused(model, ": the graph has inputs that are not in the signature.");
  model["graph_module"]["signature"]["input_specs"].push_back({{"user_input", {{"arg", tensor_argument("y")}}}});
  expect_model_refused(model, ": input 3: there are more inputs than the structure of the inputs has.");
  model = small_model();
  model["graph_module"]["signature"]["input_specs"].erase(2);
  graph_of(model)["inputs"].erase(2);
  expect_model_refused(model, ": there are fewer inputs than the structure of the inputs has.");
}

TEST(Reading, WantsAsManyOutputsInAllPlaces) {
  json model = small_model();
  model["graph_module"]["signature"]["output_specs"].push_back({{"user_output", {{"arg", tensor_argument("linear")}}}});
  expect_model_refused(model, ": there are 2 outputs, and the structure of the outputs has 1.");
}

TEST(Reading, WantsTheModelsOwnSignature) {
  json model = small_model();
  model["graph_module"]["module_call_graph"][0]["signature"] = nullptr;
  expect_model_refused(model, ": the model itself has no signature.");
  model["graph_module"]["module_call_graph"] = json::array();
  expect_model_refused(model, ": the model itself has no signature.");
}

TEST(Reading, RefusesTreesOfOtherVersionsAndKinds) {
  const auto with_inputs = [](const std::string& spec) {
    json model = small_model();
    model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = spec;
    return model;
  };
  const std::string place = ", the structure of the inputs: ";
  expect_model_refused(with_inputs("[2, {}]"), place + "is of version 2; version 1 is what can be read.");
  expect_model_refused(with_inputs("nonsense"), place + "is not JSON: ");
  for (const std::string spec : {"{}", "[]", "[1]", "[1, 2, 3]", "[\"1\", {}]", "[1.5, {}]"}) {
    expect_model_refused(with_inputs(spec), place + "should be a version and a tree.");
  }
  expect_model_refused(with_inputs("[1, 5]"),
                       place + "found number where a node with a type and children_spec should be.");
  expect_model_refused(with_inputs("[1, {}]"),
                       place + "found object where a node with a type and children_spec should be.");
  expect_model_refused(with_inputs(R"([1, {"type": 3, "children_spec": []}])"),
                       place + "the type of a node should be a string.");
  expect_model_refused(with_inputs(R"([1, {"type": "builtins.dict", "context": "[\"a\"]", "children_spec": []}])"),
                       place + "a builtins.dict should have a key for each child, all strings or all integers.");
  expect_model_refused(with_inputs(R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": []}])"),
                       ": the inputs should be a tuple of arguments and a dict of keyword arguments.");
  json model = small_model();
  model["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = "[3, {}]";
  expect_model_refused(model, ", the structure of the outputs: is of version 3; version 1 is what can be read.");
}

// Keyword arguments have names.
TEST(Reading, RefusesKeywordArgumentsThatAreNumbered) {
  json model = small_model();
  const std::string leaf = R"({"type": null, "context": null, "children_spec": []})";
  model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] =
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": "builtins.tuple", "context": )"
      R"("null", "children_spec": []}, {"type": "builtins.dict", "context": "[1]", "children_spec": [)" +
      leaf + "]}]}]";
  expect_model_refused(model, ": the inputs should be a tuple of arguments and a dict of keyword arguments.");
}

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
  const std::string outside = ", 'layer.bias': does not lie within the 16 bytes of weight_1.";
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
  // Two sizes whose product comes round to a small number.
  expect_weights_refused(with_bias([&](json& meta) {
                           meta["sizes"] = {number(huge), number(4)};
                           meta["strides"] = {number(4), number(1)};
                         }),
                         outside);
  // Nothing lies nowhere.
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
                         ", 'layer.bias': is an object of Python's, which could run code when it is read; plain "
                         "tensors can be read.");
  weights = small_weights();
  weights["config"]["layer.bias"]["tensor_meta"] = nullptr;
  expect_weights_refused(weights, ", 'layer.bias': is an object of Python's, which could run code");
}

TEST(Reading, RefusesCodesThatThereAreNot) {
  for (const int code : {0, 22, 99, -1}) {
    const std::string words = "there is no dtype of code " + std::to_string(code) + ".";
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
  expect_weights_refused(weights, ", 'layer.bias': there is no layout of code 77.");
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
  expect_weights_refused(weights, ", 'layer.bias': a size that should be fixed is s7.");
}

TEST(Reading, RefusesAnAutocastToADtypeThatThereIsNot) {
  const auto argument = [](const json& value) { return json{{"name", ""}, {"arg", value}, {"kind", 1}}; };
  for (const json& dtype : {json{{"as_int", 999}}, json{{"as_scalar_type", 999}}, json{{"as_int", -5}}}) {
    json model = small_model();
    json body = graph_of(model);
    body["inputs"] = json::array({tensor_argument("linear")});
    body["nodes"] = json::array({nodes_of(model)[1]});
    json region =
        node("region", "torch.ops.higher_order.wrap_with_autocast", {}, json::array({tensor_argument("relu")}));
    region["inputs"] = {argument({{"as_string", "cpu"}}),
                        argument(dtype),
                        argument({{"as_bool", true}}),
                        argument({{"as_bool", true}}),
                        argument({{"as_graph", {{"name", "body"}, {"graph", body}}}}),
                        argument(tensor_argument("linear"))};
    nodes_of(model)[1] = region;
    SCOPED_TRACE(dtype.dump());
    expect_model_refused(model, ": node 1 'region': ");
  }
}

TEST(Reading, GivesWeightsThatAreOneTensorUnderAllNames) {
  json weights = small_weights();
  weights["config"]["again"] = weights["config"]["layer.bias"];
  weights["config"]["part"] = weights["config"]["layer.bias"];
  weights["config"]["part"]["tensor_meta"]["sizes"][0]["as_int"] = 2;
  weights["config"]["part"]["tensor_meta"]["storage_offset"]["as_int"] = 1;
  weights["config"]["part"]["tensor_meta"]["requires_grad"] = false;
  const std::string bytes = zipped(small_records(small_model(), weights));
  const std::map<std::string, at::Tensor> read = read_weights(Archive(bytes, "small"));
  EXPECT_TRUE(read.at("again").is_same(read.at("layer.bias")));
  EXPECT_TRUE(read.at("part").is_alias_of(read.at("layer.bias")));
  EXPECT_TRUE(same(at::arange(1, 3, at::kFloat), read.at("part")));
  EXPECT_TRUE(read.at("layer.bias").requires_grad());
}

// What is run stays in memory.
TEST(Reading, RefusesOperatorsThatOpenFiles) {
  json model = small_model();
  const json name = {{"as_string", "/nowhere/that/there/is"}};
  nodes_of(model).push_back(node("file", "torch.ops.aten.from_file.default",
                                 {{"filename", name}, {"shared", {{"as_bool", true}}}, {"size", {{"as_int", 4}}}},
                                 json::array({tensor_argument("file")})));
  expect_model_refused(model, ": node 2 'file': ");
}

// Any change to the JSON gives a program or a ProgramError, in reading, in cutting and in running it.
TEST(Reading, SurvivesAnyJson) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 1);
  const auto cases = static_cast<int>(from_environment("PENSTOCK_CASES", 3000));
  const json model = [] {
    json whole = small_model();
    nodes_of(whole).push_back(node("size", "torch.ops.aten.sym_size.int",
                                   {{"self", tensor_argument("x")}, {"dim", {{"as_int", 0}}}},
                                   json::array({json{{"as_sym_int", {{"as_name", "size"}}}}})));
    nodes_of(whole).push_back(
        node("view", "torch.ops.aten.view.default",
             {{"self", tensor_argument("relu")}, {"size", {{"as_sym_ints", {{{"as_name", "size"}}, {{"as_int", 4}}}}}}},
             json::array({tensor_argument("view")})));
    whole["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"] = tensor_argument("view");
    whole["graph_module"]["signature"]["output_specs"].push_back(
        {{"parameter_mutation", {{"arg", {{"name", "p_bias"}}}, {"parameter_name", "layer.bias"}}}});
    return whole;
  }();
  int read_well = 0;
  // By what they say: how it came to it.
  std::map<std::string, std::string> escaped;
  for (int number = 0; number < cases; ++number) {
    Random random(seed, static_cast<std::uint64_t>(number));
    json changed = model;
    json weights = small_weights();
    json& root = random.percent(80) ? changed : weights;
    std::string what;
    for (std::int64_t changes = random.between(1, 2); changes > 0; --changes) {
      std::vector<json*> places;
      const std::function<void(json&)> collect = [&](json& place) {
        places.push_back(&place);
        if (place.is_structured()) {
          for (json& inner : place) collect(inner);
        }
      };
      collect(root);
      json& place = *random.element_of(places);
      const json copy = *random.element_of(places);
      what += place.dump().substr(0, 100) + " became ";
      switch (random.between(0, 7)) {
        case 0: place = nullptr; break;
        case 1: place = random.element_of(std::array<std::int64_t, 6>{0, -1, 7, 1 << 20, INT64_MAX, INT64_MIN}); break;
        case 2: place = random.element_of(std::array<const char*, 5>{"", "x", "linear", "layer.bias", "as_int"}); break;
        case 3: place = random.element_of(std::array<double, 3>{0.5, -1e300, 1e30}); break;
        case 4: place = json::array(); break;
        case 5: place = json::object(); break;
        case 6:
          if (place.is_structured() && !place.empty()) place.erase(place.begin());
          break;
        default: place = copy;
      }
      what += place.dump().substr(0, 100) + "; ";
    }
    try {
      const Program program = read(small_records(changed, weights));
      ++read_well;
      std::ostringstream text;
      text << pipeline(program);
      split_evenly(program, 2, estimated_costs(program));
      program.run({at::ones({2, 3})});
    } catch (const ProgramError& error) {
      EXPECT_STRNE(error.what(), "");
    } catch (const std::exception& error) {
      const std::string text = error.what();
      escaped.emplace(text.substr(0, text.find('\n')), "case " + std::to_string(number) + ": " + what);
    }
  }
  EXPECT_GT(read_well, 0);
  for (const auto& [error, how] : escaped) {
    ADD_FAILURE() << "PENSTOCK_SEED=" << seed << ": not a ProgramError: " << error << "\n" << how;
  }
}

TEST(Tree, NamesItsLeavesAndPutsThemBack) {
  const std::string leaf = R"({"type": null, "context": null, "children_spec": []})";
  const TreeSpec tree = TreeSpec::parse(
      R"([1, {"type": "builtins.dict", "context": "[\"b\", \"a\"]", "children_spec": [{"type": "builtins.list", )"
      R"("context": "null", "children_spec": [)" +
          leaf + ", " + leaf + R"(]}, {"type": "builtins.tuple", "context": "null", "children_spec": [)" + leaf +
          "]}]}]",
      "here");
  EXPECT_EQ(tree.kind(), TreeSpec::Kind::Dict);
  EXPECT_EQ(tree.leaves(), 3U);
  EXPECT_EQ(tree.paths("root"), (std::vector<std::string>{"root.b.0", "root.b.1", "root.a.0"}));
  EXPECT_EQ(tree.paths(""), (std::vector<std::string>{"b.0", "b.1", "a.0"}));
  // In any order of the keys.
  const c10::IValue value = dict({{"a", tuple({3})}, {"b", list({1, 2})}});
  const std::vector<c10::IValue> leaves = tree.flatten(value, "here");
  EXPECT_EQ(leaves, (std::vector<c10::IValue>{1, 2, 3}));
  EXPECT_TRUE(same(value, tree.unflatten(leaves)));

  const auto refused = [&](const c10::IValue& other) { return [&tree, other] { tree.flatten(other, "here"); }; };
  expect_error<ProgramError>(refused(5), "here: found int 5, expected dict with 'b', 'a'.");
  expect_error<ProgramError>(refused(dict({{"a", tuple({3})}})),
                             "here: found dict with 'a', expected dict with 'b', 'a'.");
  expect_error<ProgramError>(refused(dict({{"a", tuple({3})}, {"c", list({1, 2})}})),
                             "here: found dict with 'a', 'c', expected dict with 'b', 'a'.");
  expect_error<ProgramError>(refused(dict({{"a", tuple({3})}, {"b", list({1})}})),
                             "here.b: found list of 1, expected list of 2.");
  expect_error<ProgramError>(refused(dict({{"a", list({3})}, {"b", list({1, 2})}})),
                             "here.a: found list of 1, expected tuple of 1.");
}

}  // namespace
}  // namespace penstock::testing
