// penstock check: a model in a pipeline against the same in one process.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "penstock/cli/checks.h"
#include "penstock/cli/command.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/program/pipelined.h"
#include "penstock/program/bonds.h"
#include "penstock/program/error.h"
#include "penstock/program/state.h"
#include "penstock/program/whole_run.h"
#include "penstock/schedule/generators.h"

namespace penstock::cli {
namespace {

// What the program writes to, such as statistics, becomes again what it was.
class KeptState {
 public:
  explicit KeptState(const Program& program) {
    const std::set<int> written = written_values(*program.state()->exported);
    for (const ProgramInput& input : program.inputs()) {
      if (!written.contains(input.value)) continue;
      const at::Tensor& tensor = program.tensor(input);
      kept_.emplace_back(tensor.detach(), tensor.detach().clone());
    }
  }
  ~KeptState() {
    for (auto& [tensor, content] : kept_) tensor.copy_(content);
  }
  KeptState(const KeptState&) = delete;
  KeptState& operator=(const KeptState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

// How two tensors differ.
struct Difference {
  std::string name;
  // The largest, and as a part of the largest element.
  double absolute = 0;
  double relative = 0;
  bool is_equal = true;
  bool is_tolerable = true;
};

Difference difference_of(const std::string& name, const at::Tensor& expected, const at::Tensor& found,
                         const std::optional<double>& tolerance) {
  Difference difference{.name = name};
  if (expected.sizes() != found.sizes() || expected.scalar_type() != found.scalar_type()) {
    difference.absolute = difference.relative = std::numeric_limits<double>::infinity();
    difference.is_equal = difference.is_tolerable = false;
    return difference;
  }
  const bool numbers = expected.is_floating_point() || expected.is_complex();
  // NaN is like NaN here.
  const at::Tensor same =
      numbers ? (expected == found).logical_or(expected.isnan().logical_and(found.isnan())) : expected == found;
  difference.is_equal = same.all().item<bool>();
  if (difference.is_equal) return difference;
  const auto wide = expected.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor apart = (expected.to(wide) - found.to(wide)).abs();
  difference.absolute = apart.max().item<double>();
  const auto largest = expected.to(wide).abs().max().item<double>();
  difference.relative = largest > 0 ? difference.absolute / largest : difference.absolute;
  // By default eight times what the dtype rounds to.
  const at::ScalarType real = c10::toRealValueType(expected.scalar_type());
  const double rounds = std::pow(2.0, -(real == at::kDouble     ? 52
                                        : real == at::kFloat    ? 23
                                        : real == at::kHalf     ? 10
                                        : real == at::kBFloat16 ? 7
                                                                : 3));
  const double allowed = tolerance.value_or(numbers ? 8 * rounds : 0);
  difference.is_tolerable = difference.relative <= allowed;
  return difference;
}

std::string amount(double number) {
  std::ostringstream text;
  text.precision(3);
  text << number;
  return std::move(text).str();
}

// A line of what was compared; false when it is not to be tolerated.
struct Comparison {
  std::vector<Difference> differences;

  bool is_equal() const { return std::ranges::all_of(differences, &Difference::is_equal); }
  bool is_tolerable() const { return std::ranges::all_of(differences, &Difference::is_tolerable); }

  void write(std::ostream& out, const std::string& what) const {
    out << "  " << what << ": " << differences.size();
    if (differences.empty()) {
      out << "\n";
    } else if (is_equal()) {
      out << ", all bit-equal\n";
    } else {
      const auto worst = std::ranges::max_element(differences, {}, &Difference::relative);
      const auto equal = std::ranges::count_if(differences, &Difference::is_equal);
      out << ", of which " << equal << " are bit-equal; the largest difference is " << amount(worst->absolute) << " in "
          << worst->name << " (" << amount(worst->relative) << " of its largest element)\n";
    }
  }
};

Comparison compare(const TensorsByName& expected, const TensorsByName& found, const std::string& prefix,
                   const std::optional<double>& tolerance) {
  Comparison comparison;
  for (const auto& [name, tensor] : expected) {
    if (!name.starts_with(prefix)) continue;
    const auto other = found.find(name);
    if (other == found.end()) throw ProgramError(name + " is missing from what the pipeline gave.");
    comparison.differences.push_back(difference_of(name, tensor, other->second, tolerance));
  }
  for (const auto& [name, tensor] : found) {
    if (name.starts_with(prefix) && !expected.contains(name)) {
      throw ProgramError(name + " came out of the pipeline, and not out of one process.");
    }
  }
  return comparison;
}

}  // namespace

void add_check(CLI::App& command, int& exit) {
  struct Options {
    CutOptions cut;
    RunOptions run;
    bool eval = false;
    std::string inputs;
    std::string dump;
    std::optional<double> tolerance;
  };
  const auto options = std::make_shared<Options>();
  options->cut.add_to(command);
  options->run.add_to(command);
  command.add_flag("--eval", options->eval, "In evaluation mode: without dropout, with learnt statistics");
  command.add_option("--inputs", options->inputs, "Inputs of all microbatches: args.0, kwargs.mask, …; else made up")
      ->option_text("FILE.safetensors");
  command.add_option("--dump", options->dump, "Write what the pipeline gave: output.0, …, grad.NAME, …")
      ->option_text("FILE.safetensors");
  command
      .add_option("--tolerance", options->tolerance,
                  "The largest difference allowed, as a part of a tensor's largest element; by default what rounding "
                  "makes of sums in another order")
      ->option_text("T")
      ->check(cost());
  on_call(command, [options, &exit] {
    if (!options->dump.empty()) require_folder(options->dump);
    Program program(options->cut.model);
    if (options->eval) program.eval();
    const Pipe pipe = options->cut.cut(program, options->run.stages_wanted());
    TensorsByName batch;
    int rows = 0;
    if (!options->inputs.empty()) {
      const NamedTensors read = read_safetensors(options->inputs);
      batch = {read.begin(), read.end()};
      rows = microbatches_in(program, batch);
    }
    const Schedule schedule = options->run.make(pipe.num_stages(), rows);
    if (options->inputs.empty()) batch = example_inputs(program, schedule.microbatches(), options->run.seed);

    Pipelined pipelined(pipe, schedule, options->run, /*backward=*/true);
    pipelined.start();
    TensorsByName expected;
    if (!OwnRanks::is_rank()) {
      const KeptState kept(program);
      const WholeRun whole = run_whole(pipe, schedule, split_arguments(program, batch, schedule.microbatches()),
                                       {.intra_op_threads = options->run.threads, .seed = options->run.seed});
      expected = outputs_by_name(whole.outputs);
      for (const auto& [name, gradient] : whole.gradients) expected.emplace("grad." + name, gradient);
    }
    const TensorsByName found = pipelined.run(batch);
    const Comparison outputs = compare(expected, found, "output.", options->tolerance);
    const Comparison gradients = compare(expected, found, "grad.", options->tolerance);
    const bool is_equal = outputs.is_equal() && gradients.is_equal();
    const bool is_good = outputs.is_tolerable() && gradients.is_tolerable();
    std::cout << options->cut.model << ": " << schedule.stages() << (schedule.stages() == 1 ? " stage" : " stages")
              << " on " << schedule.ranks() << (schedule.ranks() == 1 ? " rank" : " ranks") << " ("
              << options->run.transport << "), "
              << (options->run.csv.empty() ? std::string(find_generator(options->run.schedule).name) : options->run.csv)
              << ", " << schedule.microbatches() << " microbatches, "
              << (program.is_training() ? "training" : "evaluation") << "\n";
    outputs.write(std::cout, "outputs");
    gradients.write(std::cout, "gradients");
    std::cout << (is_equal  ? "bit-equal to one process\n"
                  : is_good ? "equal to one process, but for rounding\n"
                            : "NOT what one process gives\n");
    if (!options->dump.empty()) write_safetensors(options->dump, {found.begin(), found.end()});
    exit = is_good ? kYes : kNo;
  });
}

}  // namespace penstock::cli
