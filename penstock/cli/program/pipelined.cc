#include "penstock/cli/program/pipelined.h"

#include <ATen/ops/arange.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <utility>

#include "penstock/cli/command.h"
#include "penstock/cli/output.h"
#include "penstock/program/error.h"
#include "penstock/program/whole_run.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/tensor/nested.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/processes.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::cli {
namespace {

// Where ranks that are processes leave what they have computed.
constexpr const char* kFolder = "PENSTOCK_RESULTS";

// A folder that goes with it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder can be made: " + name);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string results_of(const std::filesystem::path& folder, int rank) {
  return folder / ("rank-" + std::to_string(rank) + ".safetensors");
}

std::string error_of(const std::filesystem::path& folder, int rank) {
  return folder / ("rank-" + std::to_string(rank) + ".error");
}

// The words of this process's own command line.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  words.erase(words.begin());
  return words;
}

std::chrono::milliseconds in_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

}  // namespace

struct Pipelined::Processes {
  TemporaryFolder folder;
  ProcessRanks ranks;

  explicit Processes(int count)
      : ranks({.program = "/proc/self/exe",
               .arguments = own_words(),
               .ranks = count,
               .environment = {{kFolder, folder.path().string()}}}) {}
};

Pipelined::Pipelined(const Pipe& pipe, const Schedule& schedule, const RunOptions& options, bool backward)
    : pipe_(pipe), schedule_(schedule), options_(options), backward_(backward) {}

Pipelined::~Pipelined() = default;

bool Pipelined::is_rank() {
  return std::getenv(kFolder) != nullptr;
}

void Pipelined::start() {
  if (options_.transport == "gloo" && !is_rank()) processes_ = std::make_unique<Processes>(schedule_.ranks());
}

TensorsByName Pipelined::run_here(const TensorsByName& batch, std::shared_ptr<Transport> transport) {
  const Arguments arguments = arguments_from(pipe_.program(), batch);
  std::vector<PipelineStage> stages;
  if (transport == nullptr) {
    stages = pipe_.build_stages();
  } else {
    for (const int stage : schedule_.placement().stages_of(transport->rank()))
      stages.push_back(pipe_.build_stage(stage));
  }
  std::vector<c10::IValue> outputs(static_cast<std::size_t>(schedule_.microbatches()));
  bool has_outputs = false;
  std::mutex mutex;
  PipelineOptions options{.transport = std::move(transport)};
  // The target of a microbatch is its number, so that its output is known by it.
  options.loss = [&](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    const std::scoped_lock lock(mutex);
    outputs[static_cast<std::size_t>(target.toTensor().item<std::int64_t>())] = flatten_args_detach(output).value;
    has_outputs = true;
    return sum_of_means(output);
  };
  options.shared = pipe_.shared_parameters();
  options.timeout = in_milliseconds(options_.timeout);
  options.intra_op_threads = options_.threads;
  options.seed = options_.seed;
  Pipeline pipeline(std::move(stages), pipe_.wiring(), schedule_, std::move(options));
  const at::Tensor numbers = at::arange(schedule_.microbatches(), at::kLong);
  StepOptions step;
  step.return_outputs = false;
  if (backward_) {
    pipeline.step(arguments.args, arguments.kwargs, numbers, step);
  } else {
    pipeline.eval(arguments.args, arguments.kwargs, numbers, step);
  }
  TensorsByName result;
  if (has_outputs) result = outputs_by_name(outputs);
  if (!backward_) return result;
  for (const PipelineStage& stage : pipeline.stages()) {
    for (const auto& [name, tensor] : pipe_.state_dict(stage.stage_index())) {
      if (tensor.grad().defined()) result.emplace("grad." + name, tensor.grad());
    }
  }
  return result;
}

TensorsByName Pipelined::run(const TensorsByName& batch) {
  if (is_rank()) {
    const std::filesystem::path folder = std::getenv(kFolder);
    const int rank = read_environment().rank;
    try {
      const TensorsByName result = run_here(batch, c10d_transport(rendezvous(in_milliseconds(options_.timeout))));
      write_safetensors(results_of(folder, rank), {result.begin(), result.end()});
      std::exit(kYes);
    } catch (const std::exception& error) {
      // The process that has started this one says it, once.
      std::ofstream(error_of(folder, rank)) << error.what();
      std::exit(kBadUse);
    }
  }
  if (options_.transport == "threads") return run_here(batch, nullptr);
  const auto ends = processes_->ranks.wait(Clock::now() + std::chrono::hours(24));
  const std::filesystem::path& folder = processes_->folder.path();
  TensorsByName result;
  for (int rank = 0; rank < schedule_.ranks(); ++rank) {
    if (!ends[static_cast<std::size_t>(rank)].is_good()) continue;
    for (auto& [name, tensor] : read_safetensors(results_of(folder, rank))) result.emplace(name, tensor);
  }
  for (int rank = 0; rank < schedule_.ranks(); ++rank) {
    const ProcessEnd& end = ends[static_cast<std::size_t>(rank)];
    if (end.is_good()) continue;
    if (std::filesystem::exists(error_of(folder, rank))) throw std::runtime_error(read_file(error_of(folder, rank)));
  }
  for (int rank = 0; rank < schedule_.ranks(); ++rank) {
    const ProcessEnd& end = ends[static_cast<std::size_t>(rank)];
    if (!end.is_good()) throw std::runtime_error("rank " + std::to_string(rank) + " " + to_string(end) + ".");
  }
  return result;
}

}  // namespace penstock::cli
