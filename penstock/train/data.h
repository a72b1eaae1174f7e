// What a model is trained on: batches, each known by its number, so that a run goes on where another one stopped, and
// what is held out to see how good the model has become.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/runtime/batch.h"

namespace penstock {
class Program;
}

namespace penstock::internal {

// The message names the file, what is wrong in it, and what would be right.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Number of parts that a batch is split into: replicas, and for each of them microbatches.
struct BatchSplit {
  int replicas = 1;
  // Replicas that share an evaluation; process replicas evaluate all of it.
  int eval_replicas = 1;
  int microbatches = 1;
};

class Data {
 public:
  virtual ~Data() = default;

  // The number-th batch of a training, from 0 on. The same number gives the same batch.
  virtual Batch batch(std::int64_t number) const = 0;
  // What is never trained on, of the same sizes; none if there is nothing held out.
  virtual std::vector<Batch> held_out() const { return {}; }
  // Checks that every batch can be split into microbatches that the model takes, as far as sizes and types tell. Throws
  // DataError, which names the file.
  virtual void check(const BatchSplit& /*split*/) const {}
  // The loss of a microbatch: the mean over what loss_weight counts.
  virtual at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const = 0;
  // How much that counts in the loss of the whole batch: by default the number of rows of the microbatch.
  virtual double loss_weight(const Batch& microbatch) const { return static_cast<double>(rows_of(microbatch)); }
  // Number of targets of a microbatch whose class the output predicts, out of those that loss_weight counts; none if the
  // loss is not one of classes.
  virtual std::optional<std::int64_t> right_predictions(const c10::IValue& /*output*/,
                                                        const c10::IValue& /*target*/) const {
    return std::nullopt;
  }
  // How much a batch is, and of what: bytes of text, or rows.
  virtual std::int64_t size_of(const Batch& batch) const = 0;
  virtual std::string unit() const = 0;
  // In a line.
  virtual std::string description() const = 0;
  // Returns what tells this data from other data of the same options, such as a checksum; empty where options tell all.
  virtual std::string fingerprint() const { return {}; }
};

// Texts, whose bytes a model tells one after the other.
class ByteData : public Data {
 public:
  // The mean over the bytes of the target that are not ignored.
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const final;
  double loss_weight(const Batch& microbatch) const final;
  std::int64_t size_of(const Batch& batch) const final { return batch.args[0].toTensor().numel(); }
  std::string unit() const final { return "bytes"; }
};

// Sums of two numbers of so many digits, such as "123+045=0168". The loss is that of the digits behind the sign; the pairs
// held out are drawn at random, and none of them is in a batch.
class AdditionData final : public ByteData {
 public:
  // `rows` sums a batch.
  AdditionData(int digits, int rows, std::uint64_t seed);

  Batch batch(std::int64_t number) const override;
  std::vector<Batch> held_out() const override;
  std::string description() const override;

  // Of a text without its last byte, which is never read.
  int length() const { return 3 * digits_ + 2; }
  // How many of a batch's sums an output has right, digit for digit.
  int right_sums(const Batch& batch, const at::Tensor& output) const;
  // A sum as the model writes it, given all before the sign of equality: "123+045=0168".
  std::string written(const Batch& batch, const at::Tensor& output, std::int64_t row) const;

 private:
  bool is_held_out(std::int64_t left, std::int64_t right) const;
  Batch batch_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs) const;

  int digits_;
  int rows_;
  std::uint64_t seed_;
};

// Pieces of a text, with the byte behind each. The last twentieth is held out, unless the text is too short for it.
class TextData final : public ByteData {
 public:
  // A file, or all files below a folder, in the order of their names. Throws DataError for a text that is too short.
  TextData(const std::string& path, int length, int rows, std::uint64_t seed);

  Batch batch(std::int64_t number) const override;
  std::vector<Batch> held_out() const override;
  std::string description() const override;
  std::string fingerprint() const override;

 private:
  Batch pieces(const at::Tensor& firsts) const;

  std::string path_;
  int length_;
  int rows_;
  std::uint64_t seed_;
  // As bytes.
  at::Tensor text_;
  std::int64_t trained_bytes_ = 0;
};

struct BatchFilesOptions {
  // "output", the model's first output itself, or "mse" or "cross_entropy" of that and the target.
  std::string loss = "output";
  // The class that cross_entropy leaves out, in the loss and in what it counts.
  std::int64_t ignore_index = -100;
  std::uint64_t seed = 0;
  // The order is drawn anew each time around; otherwise it is that of the names.
  bool shuffle = true;
  // There is no training: the path may be one file, and without files whose names begin with "eval" all are held out.
  bool is_evaluation = false;
};

// Batches in safetensors files of a folder, one a file: arguments "args.0", "kwargs.mask", "args.1.ids", and "target". Files
// whose names begin with "eval" are held out. Throws DataError.
std::unique_ptr<Data> batch_files(const std::string& folder, const Program& program, const BatchFilesOptions& options);

}  // namespace penstock::internal
