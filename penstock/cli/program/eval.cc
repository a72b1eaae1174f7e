// penstock eval: evaluates an exported model on data.
#include <ATen/ops/stack.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/cli/checks.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/local_ranks.h"
#include "penstock/cli/program/model_files.h"
#include "penstock/cli/program/options.h"
#include "penstock/cli/train/progress.h"
#include "penstock/train/data.h"
#include "penstock/train/model.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {
namespace {

struct EvalOptions {
  CutOptions cut;
  RunOptions run;
  WeightsOption weights;
  std::string data;
  BatchFilesOptions files{.is_evaluation = true};
  bool json = false;
};

// Counts the correct predictions of all microbatches, on the rank that has the last stage.
class CountingData final : public Data {
 public:
  explicit CountingData(std::unique_ptr<Data> data) : data_(std::move(data)) {}

  Batch batch(std::int64_t number) const override { return data_->batch(number); }
  std::vector<Batch> held_out() const override { return data_->held_out(); }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    at::Tensor loss = data_->loss(output, target);
    const std::optional<at::Tensor> right = data_->right_predictions(output, target);
    const std::scoped_lock lock(mutex_);
    if (right) right_.push_back(*right);
    return loss;
  }
  double loss_weight(const Batch& microbatch) const override { return data_->loss_weight(microbatch); }
  std::int64_t size_of(const Batch& batch) const override { return data_->size_of(batch); }
  std::string unit() const override { return data_->unit(); }
  std::string description() const override { return data_->description(); }

  // Returns nullopt unless the loss compares classes. Waits for the device of the last stage.
  std::optional<std::int64_t> right() const {
    if (right_.empty()) return std::nullopt;
    return at::stack(right_).sum().item<std::int64_t>();
  }

 private:
  std::unique_ptr<Data> data_;
  mutable std::mutex mutex_;
  // Numbers of the microbatches.
  mutable std::vector<at::Tensor> right_;
};

struct Metrics {
  double loss = 0;
  // True if the loss compares classes; accuracy and perplexity are defined then.
  bool has_classes = false;
  double accuracy = 0;
  double perplexity = 0;
  std::size_t batches = 0;
  std::int64_t rows = 0;
  double seconds = 0;

  double rows_per_second() const { return static_cast<double>(rows) / seconds; }

  void write(std::ostream& out) const {
    out << "loss         " << loss << "\n";
    if (has_classes) out << "accuracy     " << 100 * accuracy << " %\nperplexity   " << perplexity << "\n";
    out << batches << (batches == 1 ? " batch, " : " batches, ") << rows << (rows == 1 ? " row, " : " rows, ")
        << short_number(rows_per_second()) << " rows/s\n";
  }
  void write_json(std::ostream& out) const {
    nlohmann::ordered_json json{{"version", 1}, {"loss", loss}};
    if (has_classes) json["accuracy"] = accuracy;
    if (has_classes) json["perplexity"] = perplexity;
    json["batches"] = batches;
    json["rows"] = rows;
    json["rows_per_second"] = rows_per_second();
    out << json.dump(2) << "\n";
  }
};

// Evaluates on all ranks in this process or, with a transport, on its rank. The rank that has the last stage prints.
void evaluate(const EvalOptions& options, const DeviceList& devices, std::shared_ptr<Transport> transport) {
  Program program = read_program(options.cut, options.weights.read());
  program.eval();
  const CountingData data(batch_files(options.data, program, options.files));
  const std::vector<Batch> batches = data.held_out();
  Pipe pipe = options.cut.cut(program, options.run.stages_wanted());
  const Schedule schedule =
      options.run.make(pipe.num_stages(), microbatches_in(program, read_inputs(batches.front().name)));
  const int last_rank = schedule.placement().rank_of(schedule.stages() - 1);
  const bool prints = transport == nullptr || transport->rank() == last_rank;
  std::vector<std::unique_ptr<Model>> replicas;
  replicas.push_back(program_model(std::move(pipe)));
  TrainerOptions trainer_options;
  trainer_options.devices = devices;
  trainer_options.transport = std::move(transport);
  trainer_options.seed = options.run.seed;
  trainer_options.intra_op_threads = options.run.threads;
  trainer_options.timeout = options.run.timeout_in_milliseconds();
  Trainer trainer(std::move(replicas), data, schedule, std::move(trainer_options));
  const auto began = Clock::now();
  const Trainer::Evaluation evaluation = trainer.evaluate(batches);
  trainer.require_finite(evaluation);
  Metrics metrics{.loss = evaluation.loss, .batches = batches.size()};
  metrics.seconds = std::chrono::duration<double>(Clock::now() - began).count();
  for (const Batch& batch : batches) metrics.rows += data.size_of(batch);
  if (const std::optional<std::int64_t> right = data.right()) {
    metrics.has_classes = true;
    metrics.accuracy = static_cast<double>(*right) / evaluation.weight;
    metrics.perplexity = std::exp(evaluation.loss);
  }
  if (!prints) return;
  options.json ? metrics.write_json(std::cout) : metrics.write(std::cout);
  std::cout.flush();
}

}  // namespace

void add_eval(CLI::App& command, int& /*exit*/) {
  const auto options = std::make_shared<EvalOptions>();
  options->cut.add_to(command);
  options->run.add_to(command, /*has_backward=*/false);
  options->weights.add_to(command, "Weights to use instead of the model's own");
  command
      .add_option(
          "--data", options->data,
          "Safetensors file with a batch, or a directory of them, of which the files named eval… are used if there are "
          "any")
      ->option_text("PATH")
      ->required();
  command
      .add_option("--loss", options->files.loss,
                  "Loss: the model's output, or its output compared with the batch's target")
      ->option_text("output|mse|cross_entropy [output]")
      ->check(one_of({"output", "mse", "cross_entropy"}));
  command.add_option("--ignore-index", options->files.ignore_index, "Target class that cross_entropy ignores")
      ->option_text("N [-100]");
  command.add_flag("--json", options->json, "Print JSON");
  on_call(command, [options] {
    const DeviceList devices = options->run.load_devices();
    const auto as_rank = [&] { evaluate(*options, devices, options->run.connect(devices)); };
    if (LocalRanks::is_rank()) {
      LocalRanks::run([&](const std::filesystem::path&, int) { as_rank(); });
    }
    if (options->run.transport == "threads") return evaluate(*options, devices, nullptr);
    const Program program = read_program(options->cut, options->weights.read());
    LocalRanks ranks(
        options->run.make(options->cut.cut(program, options->run.stages_wanted()).num_stages(), 0).ranks());
    ranks.wait(Clock::now() + std::chrono::hours(24));
  });
}

}  // namespace penstock::internal::cli
