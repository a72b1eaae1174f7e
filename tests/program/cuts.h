// Splits of programs as text.
#pragma once

#include <string>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/program/split.h"
#include "tests/program/programs.h"
#include "tests/program/zoo.h"

namespace penstock::internal::testing {

constexpr SplitPoint kBegin = SplitPoint::BEGINNING;
constexpr SplitPoint kEnd = SplitPoint::END;

inline Program from_zoo(const std::string& name) {
  return zoo_model(name).program();
}

// Returns the names of the nodes of each stage: "linear relu | linear_1".
inline std::string row_of(const Program& program, const std::vector<int>& stages) {
  std::string row;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (i > 0) row += stages[i] == stages[i - 1] ? " " : " | ";
    row += program.graph().nodes[i].name;
  }
  return row;
}
inline std::string row_of(const Program& program, const SplitSpec& spec) {
  return row_of(program, split_at(program, spec));
}

// Returns the boundary values in order: "linear 0 -> 1".
inline std::vector<std::string> boundary_values_of(const Pipe& pipe) {
  std::vector<std::string> values;
  for (const PipeInfo::BoundaryValue& one : pipe.info().boundary_values) {
    values.push_back(one.name + " " + std::to_string(one.from) + " -> " + std::to_string(one.to));
  }
  return values;
}

using Words = std::vector<std::string>;

}  // namespace penstock::internal::testing
