#include <ATen/ATen.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/inputs.h"
#include "penstock/program/program.h"
#include "penstock/runtime/step.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/reason.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/data.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;

// Returns the first tensor of a model's output: models may return others after it.
at::Tensor first_output(const c10::IValue& output) {
  const std::vector<at::Tensor> tensors = extract_tensor_args(output);
  if (tensors.empty()) throw DataError("the model returns no tensor, so there is no loss.");
  return tensors.front();
}

// Returns true if the classes are in the last dimension, as in language models, rather than in the second one, as
// PyTorch expects them.
bool has_classes_last(const at::Tensor& output, const at::Tensor& target) {
  return output.dim() == target.dim() + 1 &&
         output.sizes().slice(0, static_cast<std::size_t>(target.dim())) == target.sizes();
}

at::Tensor cross_entropy(const at::Tensor& output, const at::Tensor& target, std::int64_t ignore_index) {
  const bool is_probabilities = target.is_floating_point() && output.sizes() == target.sizes();
  if (!is_probabilities && target.scalar_type() != at::kLong) {
    throw DataError(
        concat("the loss cross_entropy takes class indices of int64, or probabilities in the shape of the output: the "
               "target is a ",
               describe(target), " and the output a ", describe(output), "."));
  }
  const auto loss_of = [&](const at::Tensor& scores, const at::Tensor& classes) {
    return at::cross_entropy_loss(scores, classes, /*weight=*/{}, at::Reduction::Mean, ignore_index);
  };
  if (!has_classes_last(output, target)) return loss_of(output, target);
  return loss_of(output.reshape({-1, output.size(-1)}), target.reshape(-1));
}

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  if (output.sizes() == target.sizes()) return at::mse_loss(output, target);
  throw DataError(
      concat("the loss mse compares each number of the output with one of the target, and their shapes differ: the "
             "output is a ",
             describe(output), " and the target a ", describe(target),
             ".\n  Hint: write the target in the shape of the output."));
}

class BatchFiles final : public Data {
 public:
  BatchFiles(const std::string& directory, const Program& program, BatchFilesOptions options)
      : directory_(directory), program_(program), options_(std::move(options)) {
    if (options_.is_evaluation && fs::is_regular_file(directory)) {
      held_out_.push_back(directory);
      return;
    }
    if (!fs::is_directory(directory)) {
      throw DataError(directory + ": is not a directory with batches in safetensors files.");
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
      if (entry.path().extension() != ".safetensors") continue;
      const bool is_held_out = entry.path().filename().string().starts_with("eval");
      (is_held_out ? held_out_ : files_).push_back(entry.path().string());
    }
    if (options_.is_evaluation && held_out_.empty()) held_out_.swap(files_);
    if (options_.is_evaluation && held_out_.empty()) {
      throw DataError(directory + ": has no file NAME.safetensors to evaluate on.");
    }
    if (!options_.is_evaluation && files_.empty()) {
      throw DataError(directory + ": has no file NAME.safetensors to train on.");
    }
    std::ranges::sort(files_);
    std::ranges::sort(held_out_);
  }

  Batch batch(std::int64_t number) const override {
    const auto count = static_cast<std::int64_t>(files_.size());
    if (!options_.shuffle) return read(files_[static_cast<std::size_t>(number % count)]);
    const RandomScope scope(options_.seed, /*step=*/number / count, /*microbatch=*/0, /*place=*/0);
    const at::Tensor order = at::randperm(count, at::kLong);
    return read(files_[static_cast<std::size_t>(order[number % count].item<std::int64_t>())]);
  }
  std::vector<Batch> held_out() const override {
    std::vector<Batch> batches;
    for (const std::string& file : held_out_) batches.push_back(read(file));
    return batches;
  }
  // The files are mapped, so this reads only their headers.
  void check(const BatchSplit& split) const override {
    std::optional<Batch> first;
    const auto check_all = [&](const std::vector<std::string>& files, int replicas) {
      for (const std::string& file : files) {
        const Batch batch = read(file, FileAccess::Map);
        if (!first) first = batch;
        check_target(batch, *first);
        check_split(batch, replicas, split.microbatches);
      }
    };
    check_all(held_out_, split.eval_replicas);
    check_all(files_, split.replicas);
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    at::Tensor first = first_output(output);
    if (options_.loss == "mse") return squared_error(first, target.toTensor());
    if (options_.loss == "cross_entropy") return cross_entropy(first, target.toTensor(), options_.ignore_index);
    if (first.numel() == 1) return first;
    throw DataError(concat("the loss output takes the model's output as the loss, and that is a ", describe(first),
                           ", expected a tensor of one element.\n  Hint: the losses mse and cross_entropy compare the "
                           "output with a target."));
  }
  std::optional<at::Tensor> right_predictions(const c10::IValue& output, const c10::IValue& target) const override {
    if (options_.loss != "cross_entropy") return std::nullopt;
    const at::Tensor scores = first_output(output);
    const at::Tensor& classes = target.toTensor();
    const std::int64_t dim = has_classes_last(scores, classes) || scores.dim() == 1 ? -1 : 1;
    const at::Tensor predicted = scores.argmax(dim);
    // The probabilities of all classes are one target.
    const at::Tensor wanted = classes.is_floating_point() ? classes.argmax(dim) : classes;
    const at::Tensor counts =
        classes.is_floating_point() ? at::ones_like(wanted, at::kBool) : wanted.ne(options_.ignore_index);
    return predicted.eq(wanted).logical_and(counts).sum();
  }
  double loss_weight(const Batch& microbatch) const override {
    if (options_.loss == "output") return static_cast<double>(rows_of(microbatch));
    const at::Tensor& target = microbatch.target.toTensor();
    if (options_.loss == "mse") return static_cast<double>(target.numel());
    if (!target.is_floating_point()) return count_targets(options_.ignore_index)(target, {});
    // The probabilities of all classes, which are in the second dimension, are one target.
    const std::int64_t classes = target.size(target.dim() > 1 ? 1 : 0);
    return static_cast<double>(target.numel()) / static_cast<double>(std::max<std::int64_t>(1, classes));
  }
  std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
  std::string unit() const override { return "rows"; }
  std::string description() const override {
    return concat(directory_, ", ", files_.size(), files_.size() == 1 ? " batch" : " batches");
  }
  std::string fingerprint() const override {
    std::string names;
    for (const auto& list : {files_, held_out_}) {
      for (const std::string& file : list) {
        std::error_code ignored;
        names += concat(fs::path(file).filename().string(), " ", fs::file_size(file, ignored), "\n");
      }
    }
    return concat(files_.size() + held_out_.size(), " files, CRC-32 of names and sizes ",
                  crc32_z(0, reinterpret_cast<const Bytef*>(names.data()), names.size()));
  }

 private:
  // Only the first evaluation and step show whether the targets' shape fits the output. This checks that all targets
  // have the dtype and the number of dimensions of the first one.
  void check_target(const Batch& batch, const Batch& first_batch) const {
    if (options_.loss == "output") return;
    const at::Tensor& target = batch.target.toTensor();
    if (options_.loss == "cross_entropy" && !target.is_floating_point() && target.scalar_type() != at::kLong) {
      throw DataError(concat(
          batch.name, ": the loss cross_entropy takes class indices of int64, or probabilities: the target is a ",
          describe(target), "."));
    }
    const at::Tensor& first = first_batch.target.toTensor();
    if (target.scalar_type() == first.scalar_type() && target.dim() == first.dim()) return;
    throw DataError(concat(batch.name, ": the target is a ", describe(target), ", and that of ", first_batch.name,
                           " is a ", describe(first), "; all should have the same dtype and number of dimensions."));
  }
  void check_split(const Batch& whole, int replicas, int microbatches) const {
    const std::string& file = whole.name;
    std::string place = file;
    try {
      std::int64_t row = 0;
      for (const Batch& replica : split_batch(whole, {}, replicas, "replicas")) {
        for (const Batch& microbatch : split_batch(replica, {}, microbatches, "microbatches")) {
          const std::int64_t next = row + rows_of(microbatch);
          place = concat(file, ", rows ", row, " to ", next - 1);
          row = next;
          const auto kwargs = microbatch.kwargs.find(0);
          program_.flatten_inputs(microbatch.args, kwargs == microbatch.kwargs.end() ? Kwargs() : kwargs->second);
        }
        place = file;
      }
    } catch (const std::exception& error) {
      throw DataError(place + ": " + reason_of(error));
    }
  }
  // Training batches are copied rather than mapped: another process that truncates a mapped file would crash this one.
  Batch read(const std::string& file, FileAccess access = FileAccess::Read) const {
    const NamedTensors named = read_safetensors(file, access);
    TensorsByName tensors(named.begin(), named.end());
    Batch batch;
    batch.name = file;
    const auto target = tensors.find("target");
    if (options_.loss == "output") {
      // This loss takes no target.
      batch.target = at::Tensor();
    } else if (target != tensors.end()) {
      batch.target = target->second;
    } else {
      throw DataError(concat(file, ": has no 'target', which the loss ", options_.loss, " compares the output with."));
    }
    if (target != tensors.end()) tensors.erase(target);
    try {
      Arguments arguments = arguments_from(program_, tensors);
      batch.args = std::move(arguments.args);
      batch.kwargs.emplace(0, std::move(arguments.kwargs));
    } catch (const std::exception& error) {
      throw DataError(file + ": " + error.what());
    }
    return batch;
  }

  std::string directory_;
  const Program& program_;
  BatchFilesOptions options_;
  std::vector<std::string> files_;
  std::vector<std::string> held_out_;
};

}  // namespace

std::unique_ptr<Data> batch_files(const std::string& directory, const Program& program,
                                  const BatchFilesOptions& options) {
  return std::make_unique<BatchFiles>(directory, program, options);
}

}  // namespace penstock::internal
