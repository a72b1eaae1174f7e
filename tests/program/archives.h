// Handmade archives: the JSON of a small program, and a zip around it with any error that a zip can have.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/program/reader/archive.h"

namespace penstock::internal::testing {

using nlohmann::json;

struct Record {
  std::string name;
  std::string bytes;
  // Values that the headers claim in place of the true ones.
  std::optional<std::uint32_t> claimed_size = std::nullopt;
  std::optional<std::uint32_t> claimed_offset = std::nullopt;
  // Compression method: 0 is stored, 8 is deflated.
  std::uint16_t method = 0;
};

inline std::uint32_t checksum(std::string_view bytes) {
  std::uint32_t sum = ~0U;
  for (const char byte : bytes) {
    sum ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1U) ^ ((sum & 1U) != 0 ? 0xedb88320U : 0U);
  }
  return ~sum;
}

// Appends a little-endian number.
inline std::string little_endian(std::uint64_t number, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text.push_back(static_cast<char>(number >> (8 * static_cast<unsigned>(i)) & 255U));
  return text;
}

// Returns a zip of the records in a folder: each after its local header, and the directory at the end.
inline std::string zipped(const std::vector<Record>& records) {
  std::string file;
  std::string directory;
  const auto put = [](std::string& to, std::uint64_t number, int bytes) { to += little_endian(number, bytes); };
  for (const Record& record : records) {
    const std::string name = "archive/" + record.name;
    const std::uint64_t offset = record.claimed_offset.value_or(static_cast<std::uint32_t>(file.size()));
    const std::uint64_t size = record.claimed_size.value_or(static_cast<std::uint32_t>(record.bytes.size()));
    std::string header;
    put(header, 20, 2);  // version
    put(header, 0, 2);
    put(header, record.method, 2);
    put(header, 0, 4);  // time
    put(header, checksum(record.bytes), 4);
    put(header, record.method == 0 ? size : record.bytes.size(), 4);
    put(header, size, 4);
    put(header, name.size(), 2);
    put(header, 0, 2);
    if (!record.claimed_offset) file.append("PK\3\4").append(header).append(name).append(record.bytes);
    directory.append("PK\1\2");
    put(directory, 20, 2);
    directory.append(header);
    directory.append(10, '\0');  // comment, disk, attributes
    put(directory, offset, 4);
    directory.append(name);
  }
  const std::size_t begin = file.size();
  file.append(directory).append("PK\5\6");
  put(file, 0, 4);
  put(file, records.size(), 2);
  put(file, records.size(), 2);
  put(file, directory.size(), 4);
  put(file, begin, 4);
  put(file, 0, 2);
  return file;
}

inline Record* find(std::vector<Record>& records, std::string_view name) {
  for (Record& record : records) {
    if (record.name == name) return &record;
  }
  throw std::out_of_range(std::string(name));
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Returns the records of a file that Python has written.
inline std::vector<Record> records_of(const std::string& path) {
  const Archive archive(path);
  std::vector<Record> records;
  for (const std::string& name : archive.records()) records.push_back({.name = name, .bytes = archive.text(name)});
  return records;
}

inline json tensor_argument(const std::string& name) {
  return {{"as_tensor", {{"name", name}}}};
}

// Returns metadata in the schema's codes, where float32 is 7 and strided is 7.
inline json tensor_meta(const std::vector<int>& sizes, bool requires_grad = false) {
  json of_sizes = json::array();
  json of_strides = json::array();
  int stride = 1;
  for (const int size : sizes | std::views::reverse) {
    of_sizes.insert(of_sizes.begin(), json{{"as_int", size}});
    of_strides.insert(of_strides.begin(), json{{"as_int", stride}});
    stride *= size;
  }
  return {{"dtype", 7},
          {"sizes", of_sizes},
          {"requires_grad", requires_grad},
          {"device", {{"type", "cpu"}, {"index", nullptr}}},
          {"strides", of_strides},
          {"storage_offset", {{"as_int", 0}}},
          {"layout", 7}};
}

inline json node(const std::string& name, const std::string& target,
                 const std::vector<std::pair<std::string, json>>& inputs, const json& outputs) {
  json given = json::array();
  for (const auto& [argument, value] : inputs) given.push_back({{"name", argument}, {"arg", value}, {"kind", 1}});
  return {
      {"target", target},
      {"inputs", given},
      {"outputs", outputs},
      {"metadata", {{"nn_module_stack", "L__self__,,demo.Model;L__self__layer,layer,torch.nn.modules.linear.Linear"}}},
      {"is_hop_single_tensor_return", nullptr},
      {"name", name},
  };
}

// Returns the model y = relu(linear(x)), with x of shape [2, 3] and a weight of shape [4, 3].
inline json small_model() {
  const std::string leaf = R"({"type": null, "context": null, "children_spec": []})";
  const std::string in_spec = R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [)"
                              R"({"type": "builtins.tuple", "context": "null", "children_spec": [)" +
                              leaf + R"(]}, {"type": "builtins.dict", "context": "[]", "children_spec": []}]}])";
  const json graph = {{"inputs", {tensor_argument("p_weight"), tensor_argument("p_bias"), tensor_argument("x")}},
                      {"outputs", {tensor_argument("relu")}},
                      {"nodes",
                       {node("linear", "torch.ops.aten.linear.default",
                             {{"input", tensor_argument("x")},
                              {"weight", tensor_argument("p_weight")},
                              {"bias", tensor_argument("p_bias")}},
                             json::array({tensor_argument("linear")})),
                        node("relu", "torch.ops.aten.relu.default", {{"self", tensor_argument("linear")}},
                             json::array({tensor_argument("relu")}))}},
                      {"tensor_values",
                       {{"p_weight", tensor_meta({4, 3}, true)},
                        {"p_bias", tensor_meta({4}, true)},
                        {"x", tensor_meta({2, 3})},
                        {"linear", tensor_meta({2, 4}, true)},
                        {"relu", tensor_meta({2, 4}, true)}}},
                      {"sym_int_values", json::object()},
                      {"sym_bool_values", json::object()},
                      {"is_single_tensor_return", false},
                      {"custom_obj_values", json::object()},
                      {"sym_float_values", json::object()}};
  const auto parameter = [](const std::string& argument, const std::string& name) {
    return json{{"parameter", {{"arg", {{"name", argument}}}, {"parameter_name", name}}}};
  };
  const json signature = {{"input_specs",
                           {parameter("p_weight", "layer.weight"),
                            parameter("p_bias", "layer.bias"),
                            {{"user_input", {{"arg", tensor_argument("x")}}}}}},
                          {"output_specs", json::array({{{"user_output", {{"arg", tensor_argument("relu")}}}}})}};
  const json call = {{"fqn", ""},
                     {"signature",
                      {{"inputs", json::array()},
                       {"outputs", json::array()},
                       {"in_spec", in_spec},
                       {"out_spec", "[1, " + leaf + "]"},
                       {"forward_arg_names", {"x"}}}}};
  return {{"graph_module",
           {{"graph", graph},
            {"signature", signature},
            {"module_call_graph", json::array({call})},
            {"metadata", json::object()},
            {"treespec_namedtuple_fields", json::object()}}},
          {"opset_version", {{"aten", 10}}},
          {"range_constraints", json::object()},
          {"schema_version", {{"major", 8}, {"minor", 20}}},
          {"verifiers", {"TRAINING"}},
          {"torch_version", "2.13.0"},
          {"guards_code", json::array()}};
}

inline json small_weights() {
  const auto weight = [](const std::string& file, const std::vector<int>& sizes) {
    return json{
        {"path_name", file}, {"is_param", true}, {"use_pickle", false}, {"tensor_meta", tensor_meta(sizes, true)}};
  };
  return {{"config", {{"layer.weight", weight("weight_0", {4, 3})}, {"layer.bias", weight("weight_1", {4})}}}};
}

// The elements of the weights are 0, 1, 2, …
inline std::vector<Record> small_records(const json& model = small_model(), const json& weights = small_weights()) {
  const auto numbers = [](int count) {
    std::string bytes;
    for (int i = 0; i < count; ++i) {
      const auto number = static_cast<float>(i);
      std::array<char, sizeof number> one{};
      std::memcpy(one.data(), &number, sizeof number);
      bytes.append(one.data(), one.size());
    }
    return bytes;
  };
  return {{.name = "data/weights/weight_0", .bytes = numbers(12)},
          {.name = "data/weights/weight_1", .bytes = numbers(4)},
          {.name = "data/weights/model_weights_config.json", .bytes = weights.dump()},
          {.name = "data/constants/model_constants_config.json", .bytes = R"({"config": {}})"},
          {.name = "models/model.json", .bytes = model.dump()},
          {.name = "archive_format", .bytes = "pt2"},
          {.name = ".data/version", .bytes = "3\n"},
          {.name = "byteorder", .bytes = "little"}};
}

inline json& graph_of(json& model) {
  return model["graph_module"]["graph"];
}
inline json& nodes_of(json& model) {
  return graph_of(model)["nodes"];
}

}  // namespace penstock::internal::testing
