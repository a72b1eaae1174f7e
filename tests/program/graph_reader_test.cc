// Reading of graphs from untrusted sources: each is read as it was written, or refused with the reason.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/program/program.h"
#include "tests/program/refused.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(Reading, NamesAValueThatIsUsedBeforeItIsMade) {
  json model = small_model();
  std::swap(nodes_of(model)[0], nodes_of(model)[1]);
  expect_error<ProgramError>(
      [&] { read(small_records(model)); },
      "small: models/model.json: node 0 'relu': uses 'linear', which no node before it produces.");
}

TEST(Reading, RefusesACycle) {
  json model = small_model();
  nodes_of(model)[0]["inputs"][0]["arg"] = tensor_argument("relu");
  expect_model_refused(model, ": node 0 'linear': uses 'relu', which no node before it produces.");
  // The cycle has one node.
  nodes_of(model)[0]["inputs"][0]["arg"] = tensor_argument("linear");
  expect_model_refused(model, ": node 0 'linear': uses 'linear', which no node before it produces.");
}

TEST(Reading, NamesAnOutputThatNothingMakes) {
  json model = small_model();
  model["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"] = tensor_argument("nothing");
  expect_model_refused(model, ": output 0: uses 'nothing', which no node before it produces.");
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
  expect_refused([] { exported("strange"); },
                 "strange.pt2: models/model.json: node 1 'twice': node 'twice' (torch.ops.strange.twice.default) of "
                 "module 'inner.odd' (__main__.Strange.Odd): there is no such operator in this process.\n  Hint: load "
                 "the library that registers it, or export the model again with PyTorch 2.13.");
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
                 "'choice' (__main__.Cond.Choice): is a higher-order operator; only regions of grad mode and of "
                 "autocast are supported.");
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
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument 'more' at this position.");
  nodes_of(model)[1]["inputs"][1]["name"] = "self";
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument 'self' at this position.");
  nodes_of(model)[1]["inputs"][1]["name"] = "";
  expect_model_refused(model, kRelu + "aten::relu(Tensor self) -> Tensor has no argument '' at this position.");
}

TEST(Reading, RefusesResultsThatAnOperatorDoesNotGive) {
  json model = small_model();
  nodes_of(model)[1]["outputs"].push_back(tensor_argument("more"));
  expect_model_refused(model, kRelu + "found 2 results, and the operator returns 1.");
  nodes_of(model)[1]["outputs"] = json::array({{{"as_tensors", {{{"name", "relu"}}}}}});
  expect_model_refused(model, kRelu + "its result 0 should be Tensor.");
  nodes_of(model)[1]["outputs"] = json::array({{{"as_string", "relu"}}});
  expect_model_refused(model, ": node 1 'relu': has a result of a kind that is not supported.");
}

TEST(Reading, RefusesArithmeticThatGivesSomethingElse) {
  json model = small_model();
  nodes_of(model).push_back(node("sum", "_operator.add", {{"", {{"as_int", 1}}}, {"", {{"as_int", 2}}}},
                                 json::array({json{{"as_sym_ints", {{{"as_name", "sum"}}}}}})));
  expect_model_refused(model,
                       ": node 2 'sum': node 'sum' (_operator.add) of module 'layer' (torch.nn.modules.linear.Linear): "
                       "arithmetic returns one number.");
}

TEST(Reading, RefusesKindsThatItDoesNotKnow) {
  const json unknown = {{"as_something_new", 1}};
  json model = small_model();
  nodes_of(model)[1]["inputs"][0]["arg"] = unknown;
  expect_model_refused(model, ": node 1 'relu': has an argument of an unknown kind.");
  // The argument may be None.
  model = small_model();
  nodes_of(model)[0]["inputs"][2]["arg"] = unknown;
  expect_model_refused(model, ": node 0 'linear': has an argument of an unknown kind.");
  model = small_model();
  model["graph_module"]["signature"]["output_specs"][0] = {{"something_new", json::object()}};
  expect_model_refused(model, ": output 0: has an unknown kind.");
  model = small_model();
  model["graph_module"]["signature"]["input_specs"][0] = {{"something_new", json::object()}};
  expect_model_refused(model, ": input 0: has an unknown kind.");
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
      ": input 0: is the custom object 'tokenizer', and custom objects are not supported.");
  expect_model_refused(with_input({{"token", {{"arg", {{"name", "p_weight"}}}}}}),
                       ": input 0: is a token of an operator with side effects, which is not supported.");
  expect_model_refused(with_output({{"token", {{"arg", {{"name", "relu"}}}}}}),
                       ": output 0: is a token of an operator with side effects, which is not supported.");
  const json gradient = {{"arg", {{"name", "relu"}}}, {"parameter_name", "layer.weight"}};
  expect_model_refused(
      with_output({{"gradient_to_parameter", gradient}}),
      ": output 0: is a gradient: the program contains its backward.\n  Hint: export the forward alone; autograd "
      "computes the backward.");
  expect_model_refused(with_argument({{"as_custom_obj", {{"name", "it"}, {"class_fqn", "a.B"}}}}),
                       ": node 1 'relu': takes the object 'it', and objects are not supported.");
  expect_model_refused(
      with_argument({{"as_operator", "torch.ops.aten.relu"}}),
      ": node 1 'relu': takes the operator 'torch.ops.aten.relu', and operators as values are not supported.");
  expect_model_refused(with_argument({{"as_nested_tensors", json::array()}}),
                       ": node 1 'relu': takes lists of lists of tensors, which are not supported.");
  expect_model_refused(with_argument({{"as_int_lists", json::array()}}),
                       ": node 1 'relu': takes lists of lists of numbers, which are not supported.");
  expect_model_refused(with_argument({{"as_string_to_argument", json::object()}}),
                       ": node 1 'relu': takes a dict, which is not supported.");
}

TEST(Reading, RefusesWritesToWhatThereIsNot) {
  json model = small_model();
  json& outputs = model["graph_module"]["signature"]["output_specs"];
  outputs.push_back({{"buffer_mutation", {{"arg", {{"name", "relu"}}}, {"buffer_name", "layer.weight"}}}});
  expect_model_refused(model, ": output 1: is written to 'layer.weight', which does not exist.");
  outputs[1] = {{"parameter_mutation", {{"arg", {{"name", "relu"}}}, {"parameter_name", "bias"}}}};
  expect_model_refused(model, ": output 1: is written to 'bias', which does not exist.");
  outputs[1] = {{"user_input_mutation", {{"arg", {{"name", "relu"}}}, {"user_input_name", "linear"}}}};
  expect_model_refused(model, ": output 1: is written to 'linear', which is not an input.");
  outputs[1] = {{"parameter_mutation", {{"arg", {{"name", "p_weight"}}}, {"parameter_name", "layer.weight"}}}};
  outputs.push_back(json(outputs[1]));
  expect_model_refused(model, ": output 2: is written to 'layer.weight', like another output.");
}

TEST(Reading, RefusesAWriteToANumber) {
  json model = small_model();
  json& signature = model["graph_module"]["signature"];
  const json number = {{"as_sym_int", {{"as_name", "x"}}}};
  signature["input_specs"][2]["user_input"]["arg"] = number;
  graph_of(model)["inputs"][2] = number;
  graph_of(model)["sym_int_values"]["x"] = {{"as_int", 3}};
  nodes_of(model) = json::array();
  signature["output_specs"] = {{{"user_output", {{"arg", number}}}},
                               {{"user_input_mutation", {{"arg", {{"name", "p_bias"}}}, {"user_input_name", "x"}}}}};
  expect_model_refused(model, ": output 1: is written to 'x', which is not a tensor.");
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

// A program cannot open files or print.
TEST(Reading, RefusesOperatorsThatReachBeyondTheProgram) {
  const json name = {{"as_string", "/nowhere/that/there/is"}};
  const std::vector<std::pair<std::string, json>> file{
      {"filename", name}, {"shared", {{"as_bool", true}}}, {"size", {{"as_int", 4}}}};
  // The name of an overload may be missing.
  for (const char* target : {"torch.ops.aten.from_file.default", "torch.ops.aten.from_file"}) {
    json model = small_model();
    nodes_of(model).push_back(node("file", target, file, json::array({tensor_argument("file")})));
    expect_model_refused(model, std::string(": node 2 'file': node 'file' (") + target +
                                    ") of module 'layer' (torch.nn.modules.linear.Linear): is not an operator that "
                                    "programs may call: those only compute on their "
                                    "arguments.\n  Hint: if you trust this model and aten::from_file, add it to "
                                    "ProgramOptions::allowed_operators.");
  }
  json model = small_model();
  std::vector<std::pair<std::string, json>> text{{"s", {{"as_string", "hello"}}}};
  nodes_of(model).push_back(node("say", "torch.ops.aten._print", text, json::array()));
  expect_model_refused(model,
                       ": node 2 'say': node 'say' (torch.ops.aten._print) of module 'layer' "
                       "(torch.nn.modules.linear.Linear): is not an operator that programs may call");
}

TEST(Reading, TakesOperatorsThatTheUserAllows) {
  json model = small_model();
  const std::vector<std::pair<std::string, json>> text{{"s", {{"as_string", "hello"}}}};
  nodes_of(model).push_back(node("say", "torch.ops.aten._print", text, json::array()));
  const std::string bytes = zipped(small_records(model));
  EXPECT_THROW(Program::from_bytes(bytes, "small"), ProgramError);
  const Program program = Program::from_bytes(bytes, "small", {.allowed_operators = {"aten::_print"}});
  EXPECT_EQ(program.graph().nodes.size(), 3U);
}

}  // namespace
}  // namespace penstock::internal::testing
