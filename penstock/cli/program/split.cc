// penstock split: prints the stages of a model and their boundary values.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "penstock/cli/checks.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/model_files.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/program/picture.h"

namespace penstock::internal::cli {
namespace {

void write_json(std::ostream& out, const Pipe& pipe) {
  const PipeInfo& info = pipe.info();
  nlohmann::ordered_json json{{"version", 1}, {"model", info.name}};
  json["stages"] = nlohmann::json::array();
  for (const PipeInfo::Stage& stage : info.stages) {
    json["stages"].push_back({{"modules", stage.modules},
                              {"nodes", stage.nodes},
                              {"parameters", stage.parameters},
                              {"buffers", stage.buffers},
                              {"flops", stage.flops},
                              {"seconds", stage.seconds},
                              {"saved_activation_bytes", stage.saved_activation_bytes}});
  }
  json["boundary_values"] = nlohmann::json::array();
  for (const PipeInfo::BoundaryValue& value : info.boundary_values) {
    json["boundary_values"].push_back(
        {{"name", value.name}, {"from", value.from}, {"to", value.to}, {"type", value.type}, {"bytes", value.bytes}});
  }
  json["shared"] = nlohmann::json::array();
  for (const std::map<int, std::string>& shared : pipe.replicated_params()) {
    std::vector<int> stages;
    for (const auto& [stage, name] : shared) stages.push_back(stage);
    json["shared"].push_back({{"name", shared.begin()->second}, {"stages", stages}});
  }
  out << json.dump(2) << "\n";
}

}  // namespace

void add_split(CLI::App& command, int& /*exit*/) {
  struct Options {
    CutOptions cut;
    bool json = false;
    std::string format = "text";
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  options->cut.add_to(command);
  auto* const json = command.add_flag("--json", options->json, "Print JSON");
  command.add_option("--format", options->format, "Output format, text or svg")
      ->check(one_of({"text", "svg"}))
      ->option_text("FORMAT [text]")
      ->excludes(json);
  command.add_option("-o,--output", options->output, "File to write to (default: standard output)")
      ->option_text("FILE");
  on_call(command, [options] {
    const Pipe pipe = options->cut.cut(read_program(options->cut));
    write_output(options->output, [&](std::ostream& out) {
      if (options->json) {
        write_json(out, pipe);
      } else if (options->format == "svg") {
        draw_pipe(out, pipe);
      } else {
        out << pipe;
      }
    });
  });
}

}  // namespace penstock::internal::cli
