#include "penstock/cli/program/pipelined.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/program/interpreter/reference_run.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/stage/accumulation.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

// Metadata key in the file of a rank's results.
constexpr const char* kSeconds = "seconds";

std::string results_file(const std::filesystem::path& directory, int rank) {
  return directory / ("rank-" + std::to_string(rank) + ".safetensors");
}

}  // namespace

Pipelined::Pipelined(const Pipe& pipe, const Schedule& schedule, const RunOptions& options, bool backward)
    : pipe_(pipe), schedule_(schedule), options_(options), backward_(backward) {}

Pipelined::~Pipelined() = default;

void Pipelined::start() {
  if (options_.transport == "gloo" && !LocalRanks::is_rank())
    processes_ = std::make_unique<LocalRanks>(schedule_.ranks());
}

TensorsByName Pipelined::run_here(const TensorsByName& batch, std::shared_ptr<Transport> transport) {
  const Arguments arguments = arguments_from(pipe_.program(), batch);
  StagedModel model =
      transport == nullptr ? pipe_.build() : pipe_.build_stages(schedule_.placement().stages_of(transport->rank()));
  std::vector<c10::IValue> outputs(static_cast<std::size_t>(schedule_.microbatches()));
  bool has_outputs = false;
  std::mutex mutex;
  PipelineOptions options{.transport = std::move(transport)};
  // The target of a microbatch is its index, by which the loss function stores its output.
  options.loss = [&](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    const std::scoped_lock lock(mutex);
    outputs[static_cast<std::size_t>(target.toTensor().item<std::int64_t>())] = flatten_args_detach(output).value;
    has_outputs = true;
    return sum_of_means(output);
  };
  options.timeout = options_.timeout_in_milliseconds();
  options.intra_op_threads = options_.threads;
  options.seed = options_.seed;
  Pipeline pipeline(std::move(model), schedule_, std::move(options));
  const at::Tensor numbers = at::arange(schedule_.microbatches(), at::kLong);
  StepOptions step;
  step.return_outputs = false;
  const auto began = Clock::now();
  if (backward_) {
    pipeline.step(arguments.args, arguments.kwargs, numbers, step);
  } else {
    pipeline.eval(arguments.args, arguments.kwargs, numbers, step);
  }
  seconds_ = std::chrono::duration<double>(Clock::now() - began).count();
  TensorsByName result;
  if (has_outputs) result = outputs_by_name(outputs);
  if (!backward_) return result;
  for (const PipelineStage& stage : pipeline.stages()) {
    for (const auto& [name, tensor] : pipe_.state_dict(stage.stage_index())) {
      const at::Tensor& gradient = tensor.grad();
      if (gradient.defined()) result.emplace("grad." + name, dense(gradient));
    }
  }
  return result;
}

TensorsByName Pipelined::run(const TensorsByName& batch) {
  if (LocalRanks::is_rank()) {
    LocalRanks::run([&](const std::filesystem::path& directory, int rank) {
      const TensorsByName result =
          run_here(batch, c10d_transport(rendezvous(options_.timeout_in_milliseconds(), print_waiting)));
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
