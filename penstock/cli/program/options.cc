#include "penstock/cli/program/options.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/cli/checks.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/local_ranks.h"
#include "penstock/program/error.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {

void add_allowed_operators(CLI::App& command, std::vector<std::string>& names) {
  command
      .add_option("--allow-operator", names,
                  "Operators to allow in addition to those that only compute on their arguments")
      ->option_text("LIBRARY::NAME…")
      ->expected(1, CLI::detail::expected_max_vector_size);
}

void CutOptions::add_to(CLI::App& command, bool required) {
  command.add_option("MODEL.pt2", model, "Exported model, written by torch.export.save")->required(required);
  auto* const places = command
                           .add_option("--at", at,
                                       "Modules to cut before, or after with NAME:end, in addition to the model's "
                                       "pipe_split() marks")
                           ->option_text("NAME…")
                           ->expected(1, CLI::detail::expected_max_vector_size);
  command
      .add_option("--stages", stages,
                  "Number of stages, cut so that they take about the same time (default: cut at the marks)")
      ->option_text("N")
      ->check(whole_number())
      ->excludes(places);
  add_allowed_operators(command, allowed_operators);
  limits.add_to(command);
}

Pipe CutOptions::cut(const Program& program, int default_stages) const {
  if (stages > 0) return pipeline(program, stages);
  if (at.empty() && program.graph().marks.empty() && default_stages > 1) return pipeline(program, default_stages);
  SplitSpec spec;
  for (const std::string& name : at) {
    constexpr std::string_view kEnd = ":end";
    if (name.ends_with(kEnd)) {
      spec.emplace_back(name.substr(0, name.size() - kEnd.size()), SplitPoint::END);
    } else {
      spec.emplace_back(name, SplitPoint::BEGINNING);
    }
  }
  return pipeline(program, spec);
}

void InitialValueOptions::add_to(CLI::App& command) {
  command
      .add_option(
          "--init-std", deviation,
          "Standard deviation of the initial weights of modules that are not PyTorch's own, in a model that was "
          "exported on the meta device and so has no values (default: refuse such modules)")
      ->option_text("X")
      ->check(float_number());
}

void InitialValueOptions::apply(Program& program, std::uint64_t seed) const {
  if (!program.has_no_values()) return;
  InitialValues of_modules = initial_values_of_modules(program);
  if (!deviation) return program.initialise(seed, std::move(of_modules));
  program.initialise(
      seed, [of_modules = std::move(of_modules), deviation = *deviation](const std::string& name, at::Tensor& values) {
        try {
          of_modules(name, values);
        } catch (const ProgramError&) {
          // A buffer of the model's own, such as a mask, has no value that could be guessed.
          if (!values.requires_grad()) throw;
          values.normal_(0, deviation);
        }
      });
}

void RunOptions::add_to(CLI::App& command, bool has_backward) {
  command.add_option("--ranks", ranks, "Number of ranks (default: as many as the schedule needs for the stages)")
      ->option_text("P")
      ->check(whole_number());
  auto* const by_name =
      command.add_option("--schedule", schedule, "Name of the schedule; `penstock schedule list` lists them")
          ->option_text("NAME [1F1B]");
  auto* const by_file =
      command.add_option("--csv", csv, "CSV file with a schedule, one row for each rank")->option_text("FILE");
  by_file->excludes(by_name)->excludes(command.get_option("--ranks"));
  command
      .add_option("--microbatches", microbatches,
                  "Number of microbatches (default: as many as the inputs can be split into, or two for each rank)")
      ->option_text("M")
      ->check(whole_number());
  if (has_backward) {
    command
        .add_option("--recompute", recompute,
                    "Parts that save only their inputs and are computed again in the backward: all repeated blocks "
                    "(elements of lists that call more than one operator), whole stages, none, or modules by name")
        ->option_text("all|stages|none|NAME… [none]")
        ->expected(1, CLI::detail::expected_max_vector_size);
  }
  command.add_option("--transport", transport, "Thread ranks, or process ranks that communicate through Gloo")
      ->option_text("threads|gloo [threads]")
      ->check(one_of({"threads", "gloo"}));
  device.add_to(command);
  device_transport.add_to(command);
  command.add_option("--threads", threads, "Number of intra-op threads of each rank")
      ->option_text("N [1]")
      ->check(whole_number());
  command.add_option("--seed", seed, "Seed of random numbers, for dropout and random inputs")
      ->option_text("S [0]")
      ->check(cli::seed());
  command.add_option("--timeout", timeout, "Timeout of each wait for another rank, in seconds")
      ->option_text("T [300]")
      ->check(duration());
}

std::chrono::milliseconds RunOptions::timeout_in_milliseconds() const {
  // Longer than any run, and short enough to be counted in milliseconds.
  const double longest = std::chrono::duration<double>(kForever).count();
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(std::min(timeout, longest)));
}

DeviceList RunOptions::load_devices(bool are_launched) const {
  DeviceList devices = device.load();
  device_transport.require_possible(devices, are_launched || transport == "gloo");
  return devices;
}

std::unique_ptr<Transport> RunOptions::connect(const DeviceList& devices, RankOptions agreed) const {
  C10dOptions options = device_transport.options(devices);
  options.agreed = std::move(agreed);
  return c10d_transport(rendezvous(timeout_in_milliseconds(), print_notice), std::move(options));
}

int RunOptions::stages_wanted() const {
  if (!csv.empty()) return parse_csv(read_file(csv), {.source = csv}).stages();
  return ranks == 0 ? 1 : ranks * find_generator(schedule).default_stages_per_rank();
}

void RunOptions::require_valid() const {
  if (recompute.size() == 1) return;
  for (const std::string& word : recompute) {
    if (word != "all" && word != "stages" && word != "none") continue;
    throw std::runtime_error(concat("--recompute ", join(recompute, " "), ": '", word,
                                    "' stands alone.\n  Hint: give MODEL.pt2 before the options, and either '", word,
                                    "' or the names of modules."));
  }
}

void RunOptions::recompute_modules(Program& program) const {
  if (recomputes("none") || recomputes("stages")) return;
  if (!recomputes("all")) return program.recompute(recompute);
  const std::vector<std::string> modules = program.repeated_modules();
  if (modules.empty()) {
    throw ProgramError(concat(program.name(), ": --recompute all finds no blocks in lists that the model repeats.\n",
                              "  Hint: name modules, or recompute whole stages with --recompute stages."));
  }
  program.recompute(modules);
}

Schedule RunOptions::make(int stages, int available) const {
  const Schedule made = make_without_recomputation(stages, available);
  return recomputes("stages") ? add_recomputation(made) : made;
}

Schedule RunOptions::make_without_recomputation(int stages, int available) const {
  if (!csv.empty()) {
    Schedule read = parse_csv(read_file(csv), {.source = csv});
    if (read.stages() != stages) {
      throw ProgramError(
          concat(csv, ": found ", read.stages(), " stages, expected ", stages, ", as the model is cut."));
    }
    if (microbatches != 0 && microbatches != read.microbatches()) {
      throw ProgramError(concat(csv, ": found ", read.microbatches(), " microbatches, expected ", microbatches,
                                " by --microbatches."));
    }
    return read;
  }
  const Generator& generator = find_generator(schedule);
  const std::string name(generator.name);
  int per_rank = generator.stages_per_rank;
  if (per_rank == 0) per_rank = ranks > 0 && stages % ranks == 0 ? stages / ranks : generator.default_stages_per_rank();
  // A single stage runs on one rank under any schedule.
  if (generator.stages_per_rank == 0 && stages == 1) per_rank = 1;
  const int found = ranks > 0 ? ranks : stages / per_rank;
  if (found * per_rank != stages) {
    const std::string on_ranks = ranks > 0 ? concat(ranks, ranks == 1 ? " rank" : " ranks") : "any number of ranks";
    throw ProgramError(concat(name, " has ", per_rank, per_rank == 1 ? " stage" : " stages", " per rank, so ", stages,
                              " stages cannot be placed on ", on_ranks,
                              ".\n  Hint: cut the model with --stages N, or choose another schedule."));
  }
  const int count = microbatches > 0 ? microbatches : available > 0 ? available : 2 * found;
  return generate(schedule, {.ranks = found, .stages_per_rank = per_rank, .microbatches = count});
}

}  // namespace penstock::internal::cli
