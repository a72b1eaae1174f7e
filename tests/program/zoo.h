// Models that zoo.py has exported, with the results of eager PyTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/inputs.h"
#include "penstock/program/interpreter/reference_run.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/safetensors.h"

namespace penstock::internal::testing {

struct ZooCut {
  SplitSpec at = {};
  int stages = 0;
  std::string why;
};

struct ZooModel {
  std::string name;
  int microbatches = 0;
  bool training = false;
  double tolerance = 0;
  std::vector<ZooCut> cuts = {};

  static std::string folder() {
    const char* const folder = std::getenv("PENSTOCK_ZOO");
    return folder == nullptr ? "" : std::string(folder) + "/";
  }
  std::string path(const std::string& ending) const { return folder() + name + ending; }
  Program program() const {
    Program read(path(".pt2"));
    if (!training) read.eval();
    return read;
  }
};

inline nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

inline ZooModel zoo_model(const std::string& name) {
  const nlohmann::json read = read_json(ZooModel::folder() + name + ".json");
  ZooModel model{.name = name,
                 .microbatches = read.at("microbatches"),
                 .training = read.at("mode") == "train",
                 .tolerance = read.at("tolerance")};
  for (const nlohmann::json& cut : read.at("cuts")) {
    ZooCut one{.stages = cut.at("stages"), .why = cut.value("why", "")};
    for (const std::string at : cut.at("at")) {
      const bool end = at.ends_with(":end");
      one.at.emplace_back(end ? at.substr(0, at.size() - 4) : at, end ? SplitPoint::END : SplitPoint::BEGINNING);
    }
    model.cuts.push_back(std::move(one));
  }
  return model;
}

inline std::vector<std::string> zoo_names() {
  if (ZooModel::folder().empty()) return {};
  return read_json(ZooModel::folder() + "zoo.json").get<std::vector<std::string>>();
}

inline TensorsByName tensors_of(const std::string& path) {
  const NamedTensors read = read_safetensors(path);
  return {read.begin(), read.end()};
}

inline std::vector<Arguments> microbatches_of(const ZooModel& model, const Program& program) {
  return split_arguments(program, tensors_of(model.path(".inputs.safetensors")), model.microbatches);
}

}  // namespace penstock::internal::testing
