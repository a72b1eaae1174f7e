// penstock run: inference in a pipeline.
#include <iostream>
#include <memory>
#include <string>

#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/model_files.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/program/pipelined.h"
#include "penstock/cli/train/progress.h"
#include "penstock/tensor/safetensors.h"

namespace penstock::internal::cli {

void add_run(CLI::App& command, int& /*exit*/) {
  struct Options {
    CutOptions cut;
    RunOptions run;
    std::string inputs;
    std::string output;
    WeightsOption weights;
  };
  const auto options = std::make_shared<Options>();
  options->cut.add_to(command);
  options->run.add_to(command, /*has_backward=*/false);
  command
      .add_option("--inputs", options->inputs, "Input tensors, args.0, kwargs.mask, …, for all microbatches together")
      ->option_text("FILE.safetensors")
      ->required();
  command.add_option("--output", options->output, "File to write the outputs to: output.0, …")
      ->option_text("FILE.safetensors")
      ->required();
  options->weights.add_to(command, "Weights to use instead of the model's own");
  on_call(command, [options] {
    const DeviceList devices = options->run.load_devices();
    require_writable_path(options->output);
    Program program = read_program(options->cut, options->weights.read());
    program.eval();
    const Pipe pipe = options->cut.cut(program, options->run.stages_wanted());
    const TensorsByName batch = read_inputs(options->inputs);
    const Schedule schedule = options->run.make(pipe.num_stages(), microbatches_in(program, batch));
    split_inputs(program, batch, schedule.microbatches());
    Pipelined pipelined(pipe, schedule, options->run, devices, /*backward=*/false);
    pipelined.start();
    const TensorsByName outputs = pipelined.run(batch);
    write_safetensors(options->output, {outputs.begin(), outputs.end()});
    for (const auto& [name, tensor] : outputs) std::cout << name << " " << to_string(TensorMeta(tensor)) << "\n";
    const auto rows = static_cast<double>(rows_in(batch));
    std::cout << rows_in(batch) << (rows == 1 ? " row, " : " rows, ") << short_number(rows / pipelined.seconds())
              << " rows/s\n";
  });
}

}  // namespace penstock::internal::cli
