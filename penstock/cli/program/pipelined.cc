#include "penstock/cli/program/pipelined.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/host_copies.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/reference_run.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/stage/accumulation.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/step_batches.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

// Metadata key in the file of a rank's results.
constexpr const char* kSeconds = "seconds";

std::string results_file(const std::filesystem::path& directory, int rank) {
  return directory / ("rank-" + std::to_string(rank) + ".safetensors");
}

// Returns the microbatches in the order of their forwards in the last stage.
std::vector<int> forwards_of_last_stage(const Schedule& schedule) {
  std::vector<int> order;
  const int last = schedule.stages() - 1;
  for (const Action& action : schedule.actions(schedule.placement().rank_of(last))) {
    for_each_part(action, [&](const Action& part) {
      if (part.stage == last && is_forward(part)) order.push_back(part.microbatch);
    });
  }
  return order;
}

}  // namespace

Pipelined::Pipelined(const Pipe& pipe, const Schedule& schedule, const RunOptions& options, const DeviceList& devices,
                     bool backward)
    : pipe_(pipe), schedule_(schedule), options_(options), devices_(devices), backward_(backward) {}

Pipelined::~Pipelined() = default;

void Pipelined::start() {
  if (options_.transport == "gloo" && !LocalRanks::is_rank())
    processes_ = std::make_unique<LocalRanks>(schedule_.ranks());
}

TensorsByName Pipelined::run_here(const TensorsByName& batch, std::shared_ptr<Transport> transport) {
  Arguments arguments = arguments_from(pipe_.program(), batch);
  if (!devices_.is_cpu()) {
    Batch inputs =
        pinned_batch({.args = std::move(arguments.args), .kwargs = {{0, std::move(arguments.kwargs)}}, .target = {}});
    arguments = {.args = std::move(inputs.args), .kwargs = std::move(inputs.kwargs.at(0))};
  }
  const StageDevices device_of = [&](int stage) {
    return devices_.of(transport == nullptr ? schedule_.placement().rank_of(stage) : read_environment().local_rank);
  };
  StagedModel model = transport == nullptr
                          ? pipe_.build(device_of)
                          : pipe_.build_stages(schedule_.placement().stages_of(transport->rank()), device_of);
  const std::vector<int> order = forwards_of_last_stage(schedule_);
  std::size_t next = 0;
  std::vector<c10::IValue> outputs(static_cast<std::size_t>(schedule_.microbatches()));
  bool has_outputs = false;
  PipelineOptions options{.transport = std::move(transport)};
  // The loss of each microbatch is computed after its forward in the last stage, on the thread of one rank.
  options.loss = [&](const c10::IValue& output, const c10::IValue&, const Kwargs&) {
    outputs[static_cast<std::size_t>(order.at(next++))] = flatten_args_detach(output).value;
    has_outputs = true;
    return sum_of_means(output);
  };
  options.timeout = options_.timeout_in_milliseconds();
  options.intra_op_threads = options_.threads;
  options.seed = options_.seed;
  Pipeline pipeline(std::move(model), schedule_, std::move(options));
  // An evaluation computes losses if there is a target, and a numbering fits any rows.
  const at::Tensor target = at::arange(schedule_.microbatches(), at::kLong);
  StepOptions step;
  step.return_outputs = false;
  const auto began = Clock::now();
  if (backward_) {
    pipeline.step(arguments.args, arguments.kwargs, target, step);
  } else {
    pipeline.eval(arguments.args, arguments.kwargs, target, step);
  }
  TensorsByName result;
  if (has_outputs) result = outputs_by_name(outputs);
  copy_to_host(result, "outputs");
  seconds_ = std::chrono::duration<double>(Clock::now() - began).count();
  if (!backward_) return result;
  TensorsByName gradients;
  for (const PipelineStage& stage : pipeline.stages()) {
    // The names are those of the program's own tensors, of which a stage on a device has copies in the same order.
    const NamedTensors& own = pipe_.get_stage_module(stage.stage_index()).parameters;
    for (const auto& [name, tensor] : pipe_.state_dict(stage.stage_index())) {
      const auto found =
          std::ranges::find_if(own, [&, &tensor = tensor](const auto& named) { return named.second.is_same(tensor); });
      if (found == own.end()) continue;
      const at::Tensor& gradient = stage.parameters()[static_cast<std::size_t>(found - own.begin())].second.grad();
      if (gradient.defined()) gradients.emplace("grad." + name, dense(gradient));
    }
  }
  copy_to_host(gradients, "gradients");
  result.merge(gradients);
  return result;
}

void Pipelined::copy_to_host(TensorsByName& tensors, const char* what) const {
  HostCopies copies;
  for (auto& [name, tensor] : tensors) tensor = copies.start(tensor);
  if (copies.wait(deadline_after(options_.timeout_in_milliseconds()))) return;
  throw std::runtime_error(concat("a device has not computed the ", what,
                                  " within the timeout.\n  Hint: raise --timeout, or see whether the device hangs."));
}

TensorsByName Pipelined::run(const TensorsByName& batch) {
  if (LocalRanks::is_rank()) {
    LocalRanks::run([&](const std::filesystem::path& directory, int rank) {
      const TensorsByName result = run_here(batch, options_.connect(devices_));
      write_safetensors(results_file(directory, rank), {result.begin(), result.end()},
                        {{kSeconds, std::to_string(seconds_)}});
    });
  }
  if (options_.transport == "threads") return run_here(batch, nullptr);
  processes_->wait(Clock::now() + std::chrono::hours(24));
  TensorsByName result;
  for (int rank = 0; rank < schedule_.ranks(); ++rank) {
    const SafetensorsFile file(results_file(processes_->directory(), rank));
    for (const std::string& name : file.names()) result.emplace(name, file.tensor(name));
    seconds_ = std::max(seconds_, std::stod(file.metadata().at(kSeconds)));
  }
  return result;
}

}  // namespace penstock::internal::cli
