#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "penstock/program/inputs.h"
#include "penstock/program/program.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/data.h"

namespace penstock {
namespace {

namespace fs = std::filesystem;

// The first output: models give other things beside it.
at::Tensor first_output(const c10::IValue& output) {
  const std::vector<at::Tensor> tensors = extract_tensor_args(output);
  if (tensors.empty()) throw DataError("the model gives no tensor, so there is no loss.");
  return tensors.front();
}

at::Tensor loss_of(const std::string& kind, const c10::IValue& output, const c10::IValue& target) {
  const at::Tensor first = first_output(output);
  if (kind == "output") {
    if (first.numel() != 1) {
      throw DataError("--loss output takes the model's output for its loss, and that has " +
                      std::to_string(first.numel()) +
                      " elements.\n  Hint: mse and cross_entropy compare it with "
                      "a target.");
    }
    return first;
  }
  const at::Tensor& wanted = target.toTensor();
  if (kind == "mse") return at::mse_loss(first, wanted);
  // Classes in the last dimension, as language models have them, or else in the second, as PyTorch has it.
  if (first.dim() == wanted.dim() + 1 &&
      first.sizes().slice(0, static_cast<std::size_t>(wanted.dim())) == wanted.sizes()) {
    return at::cross_entropy_loss(first.reshape({-1, first.size(-1)}), wanted.reshape(-1));
  }
  return at::cross_entropy_loss(first, wanted);
}

class BatchFiles final : public Data {
 public:
  BatchFiles(const std::string& folder, const Program& program, std::string loss, std::uint64_t seed)
      : folder_(folder), program_(program), loss_(std::move(loss)), seed_(seed) {
    if (!fs::is_directory(folder)) throw DataError(folder + ": is no folder with batches in safetensors files.");
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      const bool is_held_out = entry.path().filename().string().starts_with("eval");
      (is_held_out ? held_out_ : files_).push_back(entry.path().string());
    }
    if (files_.empty()) throw DataError(folder + ": has no file NAME.safetensors to train on.");
    std::ranges::sort(files_);
    std::ranges::sort(held_out_);
  }

  Batch batch(std::int64_t number) const override {
    const auto count = static_cast<std::int64_t>(files_.size());
    const RandomScope scope(seed_, /*step=*/number / count, /*microbatch=*/0, /*place=*/0);
    const at::Tensor order = at::randperm(count, at::kLong);
    return read(files_[static_cast<std::size_t>(order[number % count].item<std::int64_t>())]);
  }
  std::vector<Batch> held_out() const override {
    std::vector<Batch> batches;
    for (const std::string& file : held_out_) batches.push_back(read(file));
    return batches;
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return loss_of(loss_, output, target);
  }
  std::int64_t size_of(const Batch& batch) const override {
    std::vector<c10::IValue> values = batch.args;
    for (const auto& [name, value] : batch.kwargs.at(0)) values.push_back(value);
    std::int64_t rows = 0;
    for (const c10::IValue& value : values) {
      for (const at::Tensor& tensor : extract_tensor_args(value)) {
        rows = std::max(rows, tensor.dim() > 0 ? tensor.size(0) : 1);
      }
    }
    return rows;
  }
  std::string unit() const override { return "rows"; }
  std::string description() const override {
    return folder_ + ", " + std::to_string(files_.size()) + (files_.size() == 1 ? " batch" : " batches");
  }

 private:
  Batch read(const std::string& file) const {
    const NamedTensors read = read_safetensors(file);
    TensorsByName tensors(read.begin(), read.end());
    Batch batch;
    const auto target = tensors.find("target");
    if (target != tensors.end()) {
      batch.target = target->second;
      tensors.erase(target);
    } else if (loss_ != "output") {
      throw DataError(file + ": has no 'target', which --loss " + loss_ + " compares the output with.");
    }
    try {
      Arguments arguments = arguments_from(program_, tensors);
      batch.args = std::move(arguments.args);
      batch.kwargs.emplace(0, std::move(arguments.kwargs));
    } catch (const std::exception& error) {
      throw DataError(file + ": " + error.what());
    }
    return batch;
  }

  std::string folder_;
  const Program& program_;
  std::string loss_;
  std::uint64_t seed_;
  std::vector<std::string> files_;
  std::vector<std::string> held_out_;
};

}  // namespace

std::unique_ptr<Data> batch_files(const std::string& folder, const Program& program, const std::string& loss,
                                  std::uint64_t seed) {
  return std::make_unique<BatchFiles>(folder, program, loss, seed);
}

}  // namespace penstock
