// penstock check: compares a pipelined model with the same model in one process.
#include <ATen/core/grad_mode.h>

#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "penstock/cli/checks.h"
#include "penstock/cli/command.h"
#include "penstock/cli/interruption.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/comparison.h"
#include "penstock/cli/program/model_files.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/program/pipelined.h"
#include "penstock/cli/train/numbers.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/reference_run.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/cpu_kernels.h"
#include "penstock/tensor/safetensors.h"

namespace penstock::internal::cli {
namespace {

// Restores the tensors that the program mutates, such as running statistics of batch norm, when it is destroyed.
class RestoredState {
 public:
  explicit RestoredState(const Program& program) {
    for (const auto& [name, tensor] : program.mutated_tensors()) {
      saved_.emplace_back(tensor.detach(), tensor.detach().clone());
    }
  }
  ~RestoredState() {
    for (auto& [tensor, content] : saved_) tensor.copy_(content);
  }
  RestoredState(const RestoredState&) = delete;
  RestoredState& operator=(const RestoredState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;
};

double bytes_of_weights(const Program& program) {
  double bytes = 0;
  for (const WeightInfo& weight : program.weights()) {
    bytes += static_cast<double>(weight.numel()) * static_cast<double>(c10::elementSize(weight.dtype));
  }
  return bytes;
}

}  // namespace

void add_check(CLI::App& command, int& exit) {
  struct Options {
    CutOptions cut;
    RunOptions run;
    bool eval = false;
    bool reference = true;
    std::string inputs;
    std::string dump;
    WeightsOption weights;
    InitialValueOptions initial_values;
    std::optional<double> tolerance;
  };
  const auto options = std::make_shared<Options>();
  options->cut.add_to(command);
  options->run.add_to(command);
  command.add_flag("--eval", options->eval, "Check in evaluation mode: no dropout, batch norm with running statistics");
  command
      .add_option("--inputs", options->inputs,
                  "Input tensors, args.0, kwargs.mask, …, for all microbatches together (default: random)")
      ->option_text("FILE.safetensors");
  command
      .add_option("--dump", options->dump,
                  "File to write outputs and gradients of the pipeline to: output.0, …, grad.NAME, …")
      ->option_text("FILE.safetensors");
  command
      .add_option(
          "--tolerance", options->tolerance,
          "Largest allowed difference, relative to the largest element of a tensor or of a microbatch's contribution "
          "to it (default: 8 times the machine epsilon of its dtype)")
      ->option_text("T")
      ->check(cost());
  command.add_flag("!--no-reference", options->reference,
                   "Run the pipeline without comparing it with one process, which needs memory for the whole model");
  options->weights.add_to(command, "Weights to use instead of the model's own");
  options->initial_values.add_to(command);
  on_call(command, [options, &exit] {
    options->run.require_valid();
    const DeviceList devices = options->run.load_devices();
    if (!options->dump.empty()) require_writable_path(options->dump);
    Program program = read_program(options->cut, options->weights.read());
    options->initial_values.apply(program, options->run.seed);
    if (options->eval) program.eval();
    options->run.recompute_modules(program);
    const Pipe pipe = options->cut.cut(program, options->run.stages_wanted());
    TensorsByName batch;
    int rows = 0;
    if (!options->inputs.empty()) {
      batch = read_inputs(options->inputs);
      rows = microbatches_in(program, batch);
    }
    const Schedule schedule = options->run.make(pipe.num_stages(), rows);
    if (options->inputs.empty()) batch = example_inputs(program, schedule.microbatches(), options->run.seed);

    Pipelined pipelined(pipe, schedule, options->run, devices, /*backward=*/true);
    pipelined.start();
    TensorsByName expected;
    std::map<std::string, double> contributions;
    const bool is_compared = options->reference && !LocalRanks::is_rank();
    if (is_compared && options->run.transport == "gloo") {
      std::cout << "reference: one process, with " << bytes_text(bytes_of_weights(program))
                << " of weights and as much of gradients; --no-reference leaves it out" << std::endl;
    }
    if (is_compared) {
      const RestoredState restored(program);
      const ReferenceRun reference =
          run_reference(pipe, schedule, split_arguments(program, batch, schedule.microbatches()),
                        {.intra_op_threads = options->run.threads,
                         .seed = options->run.seed,
                         .device = devices.of(0),
                         .is_cancelled = [] { return interruptions() > 0; }});
      expected = outputs_by_name(reference.outputs);
      for (const auto& [name, gradient] : reference.gradients) expected.emplace("grad." + name, gradient);
      contributions = reference.largest_contributions;
    }
    const TensorsByName found = pipelined.run(batch);
    if (interruptions() > 0) throw std::runtime_error("interrupted before the comparison was complete.");
    if (!options->dump.empty()) write_safetensors(options->dump, {found.begin(), found.end()});
    std::cout << options->cut.model << ": " << schedule.stages() << (schedule.stages() == 1 ? " stage" : " stages")
              << " on " << schedule.ranks() << (schedule.ranks() == 1 ? " rank" : " ranks") << " ("
              << options->run.transport << (devices.is_cpu() ? "" : ", " + devices.text()) << "), "
              << (options->run.csv.empty() ? std::string(find_generator(options->run.schedule).name) : options->run.csv)
              << ", " << schedule.microbatches() << " microbatches, "
              << (program.is_training() ? "training" : "evaluation") << "\n";
    if (!options->reference) {
      std::cout << "not compared with one process\n";
      return;
    }
    const Comparison outputs = compare(expected, found, {.prefix = "output.", .tolerance = options->tolerance});
    const Comparison gradients =
        compare(expected, found, {.prefix = "grad.", .tolerance = options->tolerance, .contributions = contributions});
    const bool is_identical = outputs.is_identical() && gradients.is_identical();
    const bool is_good = outputs.is_tolerable() && gradients.is_tolerable();
    outputs.write(std::cout, "outputs");
    gradients.write(std::cout, "gradients");
    std::cout << (is_identical ? "bitwise identical to one process\n"
                  : is_good    ? "equal to one process up to rounding\n"
                               : "DIFFERENT from one process\n");
    if (!is_identical) {
      if (const auto reason = why_not_reproducible()) std::cout << "note: " << *reason << "\n";
    }
    exit = is_good ? kSuccess : kCheckFailed;
  });
}

}  // namespace penstock::internal::cli
