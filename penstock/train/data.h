// Training data. Batches are numbered, so that a resumed run continues with the next batch, and held-out batches
// measure how well the model generalises.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/batch.h"

namespace penstock {
class Program;
}

namespace penstock::internal {

// Thrown when data cannot be read, or does not fit the model or the loss. The message names the file, what was found,
// and what was expected.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Number of parts that a batch is split into: first into replicas, then each of these into microbatches.
struct BatchSplit {
  int replicas = 1;
  // Number of replicas that share an evaluation. Process replicas evaluate every batch completely.
  int eval_replicas = 1;
  int microbatches = 1;
};

// A source of batches. The members are const and may be called from several threads.
class Data {
 public:
  virtual ~Data() = default;

  // Returns a training batch. Batches are numbered from 0, and a number always stands for the same batch.
  virtual Batch batch(std::int64_t number) const = 0;
  // Returns the batches that are never trained on; none if nothing is held out.
  virtual std::vector<Batch> held_out() const { return {}; }
  // Checks sizes and dtypes: every batch can be split into microbatches that the model accepts. Throws DataError, which
  // names the file.
  virtual void check(const BatchSplit& /*split*/) const {}
  // Returns the loss of a microbatch: the mean over what loss_weight counts.
  virtual at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const = 0;
  // Returns the weight of a microbatch in the mean loss of its batch: by default its number of rows.
  virtual double loss_weight(const Batch& microbatch) const { return static_cast<double>(rows_of(microbatch)); }
  // Returns how many targets of a microbatch the output predicts correctly, out of those that loss_weight counts; none
  // unless the loss is a classification loss. The number is on the output's device.
  virtual std::optional<at::Tensor> right_predictions(const c10::IValue& /*output*/,
                                                      const c10::IValue& /*target*/) const {
    return std::nullopt;
  }
  // Returns the size of a batch for throughput, in unit(): "bytes" of text, or "rows".
  virtual std::int64_t size_of(const Batch& batch) const = 0;
  virtual std::string unit() const = 0;
  // Returns one line for people.
  virtual std::string description() const = 0;
  // Returns a text that differs for data with other contents, such as a checksum; empty if the options determine the
  // data.
  virtual std::string fingerprint() const { return {}; }
};

// Text for a byte-level language model.
class ByteData : public Data {
 public:
  // Returns the mean cross entropy over the bytes of the target that are not ignored.
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const final;
  double loss_weight(const Batch& microbatch) const final;
  std::int64_t size_of(const Batch& batch) const final { return batch.args[0].toTensor().numel(); }
  std::string unit() const final { return "bytes"; }
};

// Additions of two numbers with a fixed number of digits, such as "123+045=0168". Only the digits after the equals sign
// count in the loss. Held-out pairs are drawn at random and never occur in a training batch.
class AdditionData final : public ByteData {
 public:
  // `rows` is the number of additions per batch. Throws DataError for a number of digits that is not supported.
  AdditionData(int digits, int rows, std::uint64_t seed);

  Batch batch(std::int64_t number) const override;
  std::vector<Batch> held_out() const override;
  std::string description() const override;

  // Length of an input: of a text without its last byte, which is only a target.
  int length() const { return 3 * digits_ + 2; }
  // Returns how many sums of a batch an output predicts correctly in all digits.
  int right_sums(const Batch& batch, const at::Tensor& output) const;
  // Returns a row with the digits that the model predicts: "123+045=0168".
  std::string written(const Batch& batch, const at::Tensor& output, std::int64_t row) const;

 private:
  bool is_held_out(std::int64_t left, std::int64_t right) const;
  Batch batch_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs) const;

  int digits_;
  int rows_;
  std::uint64_t seed_;
};

// Random sequences of a text, each with the byte that follows it. The last twentieth of the text is held out, unless
// the text is too short.
class TextData final : public ByteData {
 public:
  // Reads a file, or all files below a directory in the order of their names. `length` is the length of a sequence.
  // Throws DataError for a missing or too short text.
  TextData(const std::string& path, int length, int rows, std::uint64_t seed);

  Batch batch(std::int64_t number) const override;
  std::vector<Batch> held_out() const override;
  std::string description() const override;
  std::string fingerprint() const override;

 private:
  // Returns the sequences that begin at the given positions.
  Batch sequences(const at::Tensor& starts) const;

  std::string path_;
  int length_;
  int rows_;
  std::uint64_t seed_;
  // The bytes of the text as uint8.
  at::Tensor text_;
  std::int64_t training_bytes_ = 0;
};

struct BatchFilesOptions {
  // "output" uses the model's first output as the loss; "mse" and "cross_entropy" compare it with the target.
  std::string loss = "output";
  // Class that cross_entropy ignores, in the loss and in its weight.
  std::int64_t ignore_index = -100;
  std::uint64_t seed = 0;
  // If true, each epoch draws a new order; otherwise files are read in the order of their names.
  bool shuffle = true;
  // If true, there is no training: the path may be a single file, and if no file name begins with "eval", all files are
  // held out.
  bool is_evaluation = false;
};

// Returns batches from the safetensors files of a directory, one batch per file: arguments "args.0", "kwargs.mask",
// "args.1.ids", and "target". Files whose names begin with "eval" are held out. `program` outlives the result. Throws
// DataError.
std::unique_ptr<Data> batch_files(const std::string& directory, const Program& program,
                                  const BatchFilesOptions& options);

}  // namespace penstock::internal
