// penstock run: a model in a pipeline, forwards alone.
#include <iostream>
#include <memory>
#include <string>

#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/program/pipelined.h"

namespace penstock::cli {

void add_run(CLI::App& command, int& /*exit*/) {
  struct Options {
    CutOptions cut;
    RunOptions run;
    std::string inputs;
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  options->cut.add_to(command);
  options->run.add_to(command);
  command.add_option("--inputs", options->inputs, "Inputs of all microbatches: args.0, kwargs.mask, …")
      ->option_text("FILE.safetensors")
      ->required();
  command.add_option("--output", options->output, "Where outputs go: output.0, …")
      ->option_text("FILE.safetensors")
      ->required();
  on_call(command, [options] {
    require_folder(options->output);
    Program program(options->cut.model);
    program.eval();
    const Pipe pipe = options->cut.cut(program, options->run.stages_wanted());
    const NamedTensors read = read_safetensors(options->inputs);
    const TensorsByName batch(read.begin(), read.end());
    const Schedule schedule = options->run.make(pipe.num_stages(), microbatches_in(program, batch));
    split_inputs(program, batch, schedule.microbatches());
    Pipelined pipelined(pipe, schedule, options->run, /*backward=*/false);
    pipelined.start();
    const TensorsByName outputs = pipelined.run(batch);
    write_safetensors(options->output, {outputs.begin(), outputs.end()});
    for (const auto& [name, tensor] : outputs) std::cout << name << " " << to_string(TensorMeta(tensor)) << "\n";
  });
}

}  // namespace penstock::cli
