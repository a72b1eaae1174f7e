// Fuzzes the reader of exported programs: any bytes are a program or an error. An input that begins like a zip is an
// archive; any other input is the JSON of a model, or of its weights if it begins with a config, in a valid archive.
// The graph of a program refers only to values and nodes that exist, each value after the node that produces it, and
// the program can be split and printed, or is refused. A small program of operators that are safe with any arguments is
// also run, as a whole and in stages: both give the same output, or both fail. Other operators have to check their
// arguments themselves.
//
// Sizes are checked before memory is allocated: -malloc_limit_mb=64 holds for inputs of 64 kB.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/program/error.h"
#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/program/reader/archive.h"
#include "tests/program/archives.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const Graph& graph) {
  const auto values = static_cast<int>(graph.values.size());
  const auto nodes = static_cast<int>(graph.nodes.size());
  for (int number = 0; number < nodes; ++number) {
    const Node& node = graph.nodes[static_cast<std::size_t>(number)];
    require(node.call < static_cast<int>(graph.calls.size()));
    require(node.region >= 0 && node.region < static_cast<int>(graph.regions.size()));
    for_each_operand_value(node, [&](int value) {
      require(value < values);
      require(graph.values[static_cast<std::size_t>(value)].producer < number);
    });
    for_each_result(node, [&](int value) {
      require(value < values);
      require(graph.values[static_cast<std::size_t>(value)].producer == number);
    });
  }
  for (const int mark : graph.marks) require(mark >= 0 && mark <= nodes);
  for (std::size_t i = 0; i < graph.calls.size(); ++i) require(graph.calls[i].parent < static_cast<int>(i));
}

// Returns true if the program takes little time and memory, whatever the arguments of its operators are.
bool is_harmless(const Program& program) {
  static const std::set<std::string> kHarmless{
      "aten::add",   "aten::cat",   "aten::chunk", "aten::clone",     "aten::detach",   "aten::linear",
      "aten::mul",   "aten::neg",   "aten::relu",  "aten::relu_",     "aten::reshape",  "aten::select",
      "aten::slice", "aten::split", "aten::sub",   "aten::sum",       "aten::sym_size", "aten::transpose",
      "aten::view",  "aten::add_",  "aten::mul_",  "aten::unsqueeze", "aten::squeeze",  "aten::permute"};
  const Graph& graph = program.graph();
  return graph.nodes.size() <= 20 &&
         std::ranges::all_of(
             graph.nodes,
             [](const Node& node) { return !node.is_operator() || kHarmless.contains(node.operator_name()); }) &&
         std::ranges::all_of(graph.values, [](const Value& value) { return !value.type || value.type->numel() <= 64; });
}

// Returns none if the program is refused. Each call reads the program again, so that mutations have no effect on
// others.
std::optional<c10::IValue> output_of(std::string_view bytes, int stages) {
  const Program program = Program::from_bytes(bytes, "fuzz");
  try {
    const Arguments inputs = arguments_from(program, example_inputs(program, 1, /*seed=*/0));
    return stages == 1 ? program.run(inputs.args, inputs.kwargs)
                       : pipeline(program, stages).run(inputs.args, inputs.kwargs);
  } catch (const ProgramError&) {
    return std::nullopt;
  }
}

void try_run(std::string_view bytes) {
  const std::optional<c10::IValue> whole = output_of(bytes, 1);
  const std::optional<c10::IValue> in_stages = output_of(bytes, 2);
  require(whole.has_value() == in_stages.has_value());
  if (!whole) return;
  const std::string difference = testing::difference(*whole, *in_stages);
  std::cerr << difference;
  require(difference.empty());
}

bool try_cut(const Program& program, int stages) {
  try {
    std::ostringstream text;
    text << (stages == 0 ? pipeline(program) : pipeline(program, stages));
    require(!text.str().empty());
    return true;
  } catch (const ProgramError& error) {
    require(!std::string_view(error.what()).empty());
    return false;
  }
}

void try_archive(std::string_view bytes) {
  try {
    const Program program = Program::from_bytes(bytes, "fuzz");
    check(program.graph());
    try_cut(program, 0);
    try_cut(program, 3);
    if (try_cut(program, 2) && is_harmless(program)) try_run(bytes);
  } catch (const ProgramError& error) {
    require(std::string_view(error.what()).starts_with("fuzz: "));
  }
}

// Replaces a record of a valid archive.
void try_record(std::string_view name, std::string_view bytes) {
  static const auto* const kRecords = new std::vector<Record>(testing::small_records());
  std::vector<Record> records = *kRecords;
  testing::find(records, name)->bytes = bytes;
  try_archive(testing::zipped(records));
}

}  // namespace
}  // namespace penstock::internal::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (bytes.starts_with("PK")) {
    penstock::internal::testing::try_archive(bytes);
  } else if (bytes.starts_with("{\"config\"")) {
    penstock::internal::testing::try_record("data/weights/model_weights_config.json", bytes);
  } else {
    penstock::internal::testing::try_record("models/model.json", bytes);
  }
  return 0;
}
