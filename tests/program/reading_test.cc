// Reading of exports from untrusted sources: each is read as it was written, or refused with the reason.
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

#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/program/reader/exported_program.h"
#include "penstock/program/reader/json.h"
#include "penstock/program/reader/pytree.h"
#include "tests/program/refused.h"
#include "tests/program/tensor_bytes.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

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
  // A write to any file raises a signal.
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
                             "small: has no program: there is no record models/*.json in it.\n  Hint: write the "
                             ".pt2 with torch.export.save of PyTorch 2.8 or later.");
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
                             "small: models/model.json: found schema version 9, expected 8.\n  Hint: export "
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
  expect_records_refused(records, "small: was written on a machine with another byte order.");
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
  expect_records_refused(records, "small: models/model.json: does not match the schema: ");
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
  // The input structure is JSON in a string, which contains JSON in a string.
  json model = small_model();
  json& in_spec = model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"];
  in_spec = deep;
  expect_model_refused(model, ", the input structure: is nested more than 512 deep.");
  in_spec = json::array({1, {{"type", "builtins.dict"}, {"context", deep}, {"children_spec", json::array()}}}).dump();
  expect_model_refused(model, ", the input structure: is nested more than 512 deep.");
}

TEST(Reading, RefusesNumbersThatAreTooLargeForWhereTheyStand) {
  for (const double number : {1.9e48, -1.9e48, 0x1p63}) {
    json weights = small_weights();
    weights["config"]["layer.bias"]["tensor_meta"]["strides"][0]["as_int"] = number;
    expect_records_refused(small_records(small_model(), weights),
                           "small: data/weights/model_weights_config.json: found the number ");
  }
  json model = small_model();
  model["opset_version"]["aten"] = 1e300;
  expect_model_refused(model, ": found the number 1e+300, expected an integer of 64 bits.");
  // Masks have such constants.
  model = small_model();
  model["graph_module"]["metadata"]["as_floats"] = {-3.4028234663852886e+38, {1e300}};
  EXPECT_NO_THROW(parse_exported_json(model.dump(), "small"));
}

TEST(Reading, RefusesAHundredMegabytesOfBrackets) {
  std::vector<Record> records = small_records();
  find(records, "models/model.json")->bytes.assign(100'000'000, '[');
  expect_records_refused(records, "small: models/model.json: is nested more than 512 deep.");
}

TEST(Reading, WantsAsManyInputsInAllPlaces) {
  json model = small_model();
  graph_of(model)["inputs"].erase(2);
  expect_model_refused(model, ": input 2: is in the signature, but not in the graph.");
  model = small_model();
  graph_of(model)["inputs"].push_back(tensor_argument("y"));
  expect_model_refused(model, ": the graph has inputs that are not in the signature.");
  model["graph_module"]["signature"]["input_specs"].push_back({{"user_input", {{"arg", tensor_argument("y")}}}});
  expect_model_refused(model, ": input 3: there are more inputs than the input structure has.");
  model = small_model();
  model["graph_module"]["signature"]["input_specs"].erase(2);
  graph_of(model)["inputs"].erase(2);
  expect_model_refused(model, ": there are fewer inputs than the input structure has.");
}

TEST(Reading, WantsAsManyOutputsInAllPlaces) {
  json model = small_model();
  model["graph_module"]["signature"]["output_specs"].push_back({{"user_output", {{"arg", tensor_argument("linear")}}}});
  expect_model_refused(model, ": found 2 outputs, expected the 1 of the output structure.");
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
  const std::string place = ", the input structure: ";
  expect_model_refused(with_inputs("[2, {}]"), place + "found version 2, expected version 1.");
  expect_model_refused(with_inputs("nonsense"), place + "is not JSON: ");
  for (const std::string spec : {"{}", "[]", "[1]", "[1, 2, 3]", "[\"1\", {}]", "[1.5, {}]"}) {
    expect_model_refused(with_inputs(spec), place + "should be a version and a tree.");
  }
  expect_model_refused(with_inputs("[1, 5]"), place + "found number, expected a node with a type and children_spec.");
  expect_model_refused(with_inputs("[1, {}]"), place + "found object, expected a node with a type and children_spec.");
  expect_model_refused(with_inputs(R"([1, {"type": 3, "children_spec": []}])"),
                       place + "the type of a node should be a string.");
  expect_model_refused(with_inputs(R"([1, {"type": "builtins.dict", "context": "[\"a\"]", "children_spec": []}])"),
                       place + "a builtins.dict should have a key for each child, all strings or all integers.");
  expect_model_refused(with_inputs(R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": []}])"),
                       ": the inputs should be a tuple of positional arguments and a dict of keyword arguments.");
  json model = small_model();
  model["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = "[3, {}]";
  expect_model_refused(model, ", the output structure: found version 3, expected version 1.");
}

// Keyword arguments need names.
TEST(Reading, RefusesKeywordArgumentsThatAreNumbered) {
  json model = small_model();
  const std::string leaf = R"({"type": null, "context": null, "children_spec": []})";
  model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] =
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": "builtins.tuple", "context": )"
      R"("null", "children_spec": []}, {"type": "builtins.dict", "context": "[1]", "children_spec": [)" +
      leaf + "]}]}]";
  expect_model_refused(model,
                       ": the inputs should be a tuple of positional arguments and a dict of keyword arguments.");
}

// With any change to the JSON, reading, splitting and running give a result or a ProgramError.
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
  // Exceptions that are no ProgramError, with the change that caused them.
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
  // The keys may be in any order.
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
}  // namespace penstock::internal::testing
