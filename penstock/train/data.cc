#include "penstock/train/data.h"

#include <ATen/ATen.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/step.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/train/gpt.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;

// Places of random scopes, one for each kind of random numbers.
enum Place : std::int64_t { kPairs, kHeldOutPairs, kSequences };

// PyTorch's default for the target that cross entropy ignores.
constexpr std::int64_t kIgnored = -100;

std::int64_t power_of_ten(int digits) {
  std::int64_t power = 1;
  for (int i = 0; i < digits; ++i) power *= 10;
  return power;
}

std::string padded(std::int64_t number, int digits) {
  std::string text = std::to_string(number);
  text.insert(0, static_cast<std::size_t>(digits) - text.size(), '0');
  return text;
}

// Returns a copy of the bytes as uint8.
at::Tensor bytes_of(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  return at::tensor(at::ArrayRef<std::uint8_t>(bytes, text.size()));
}

std::string read_all(const fs::path& path) {
  try {
    return std::string(MappedFile(path.string(), FileAccess::Read).bytes());
  } catch (const MappingError& failure) {
    throw DataError(failure.what());
  }
}

}  // namespace

at::Tensor ByteData::loss(const c10::IValue& output, const c10::IValue& target) const {
  return at::cross_entropy_loss(output.toTensor().reshape({-1, kVocabulary}), target.toTensor().reshape(-1),
                                /*weight=*/{}, at::Reduction::Mean, kIgnored);
}

double ByteData::loss_weight(const Batch& microbatch) const {
  return count_targets(kIgnored)(microbatch.target, {});
}

AdditionData::AdditionData(int digits, int rows, std::uint64_t seed) : digits_(digits), rows_(rows), seed_(seed) {
  constexpr int kMaxDigits = 17;
  if (digits < 1 || digits > kMaxDigits) {
    throw DataError(concat("additions of numbers with ", digits, " digits: expected 1 to ", kMaxDigits, "."));
  }
}

// Holds out a twentieth of all pairs, by a hash that does not depend on the order of the two numbers.
bool AdditionData::is_held_out(std::int64_t left, std::int64_t right) const {
  constexpr std::uint64_t kOneOf = 20;
  std::uint64_t hash = seed_;
  for (const std::int64_t number : {std::min(left, right), std::max(left, right)}) {
    hash += static_cast<std::uint64_t>(number) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30U)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27U)) * 0x94d049bb133111eb;
    hash ^= hash >> 31U;
  }
  return hash % kOneOf == 0;
}

Batch AdditionData::batch_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs) const {
  std::string texts;
  for (const auto& [left, right] : pairs) {
    texts += concat(padded(left, digits_), "+", padded(right, digits_), "=", padded(left + right, digits_ + 1));
  }
  const at::Tensor ids = bytes_of(texts).to(at::kLong).view({static_cast<std::int64_t>(pairs.size()), length() + 1});
  at::Tensor target = ids.narrow(1, 1, length()).clone();
  target.narrow(1, 0, 2 * digits_ + 1).fill_(kIgnored);
  return {.args = {ids.narrow(1, 0, length()).contiguous()}, .kwargs = {}, .target = target};
}

Batch AdditionData::batch(std::int64_t number) const {
  const RandomScope scope(seed_, number, /*microbatch=*/0, kPairs);
  std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
  while (pairs.size() < static_cast<std::size_t>(rows_)) {
    const at::Tensor drawn = at::randint(power_of_ten(digits_), {rows_, 2}, at::kLong);
    const auto numbers = drawn.accessor<std::int64_t, 2>();
    for (int row = 0; row < rows_ && pairs.size() < static_cast<std::size_t>(rows_); ++row) {
      if (!is_held_out(numbers[row][0], numbers[row][1])) pairs.emplace_back(numbers[row][0], numbers[row][1]);
    }
  }
  return batch_of(pairs);
}

std::vector<Batch> AdditionData::held_out() const {
  constexpr int kSums = 512;
  const RandomScope scope(seed_, /*step=*/0, /*microbatch=*/0, kHeldOutPairs);
  std::vector<Batch> batches;
  std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
  const int count = std::max(1, kSums / rows_);
  while (static_cast<int>(batches.size()) < count) {
    const at::Tensor drawn = at::randint(power_of_ten(digits_), {256, 2}, at::kLong);
    const auto numbers = drawn.accessor<std::int64_t, 2>();
    for (std::int64_t row = 0; row < drawn.size(0); ++row) {
      if (!is_held_out(numbers[row][0], numbers[row][1])) continue;
      pairs.emplace_back(numbers[row][0], numbers[row][1]);
      if (pairs.size() < static_cast<std::size_t>(rows_)) continue;
      batches.push_back(batch_of(std::exchange(pairs, {})));
      if (static_cast<int>(batches.size()) == count) break;
    }
  }
  return batches;
}

std::string AdditionData::description() const {
  return concat("sums of two numbers with ", digits_, digits_ == 1 ? " digit" : " digits");
}

// The prediction of each digit is conditioned on the correct digits before it. If all are right, greedy generation
// would produce the same sum.
int AdditionData::right_sums(const Batch& batch, const at::Tensor& output) const {
  const at::Tensor target = batch.target.toTensor();
  const at::Tensor right = output.argmax(-1).eq(target).logical_or(target.eq(kIgnored));
  return static_cast<int>(right.all(1).sum().item<std::int64_t>());
}

std::string AdditionData::written(const Batch& batch, const at::Tensor& output, std::int64_t row) const {
  const at::Tensor ids = batch.args[0].toTensor()[row];
  const at::Tensor digits = output[row].argmax(-1);
  std::string text;
  for (int i = 0; i <= 2 * digits_ + 1; ++i) text.push_back(static_cast<char>(ids[i].item<std::int64_t>()));
  for (int i = 2 * digits_ + 1; i < length(); ++i) text.push_back(static_cast<char>(digits[i].item<std::int64_t>()));
  return text;
}

TextData::TextData(const std::string& path, int length, int rows, std::uint64_t seed)
    : path_(path), length_(length), rows_(rows), seed_(seed) {
  std::string text;
  if (fs::is_directory(path)) {
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::ranges::sort(files);
    for (const fs::path& file : files) text += read_all(file);
  } else if (!fs::exists(path)) {
    throw DataError(path + ": there is no such file or directory.");
  } else {
    text = read_all(path);
  }
  const auto needed = static_cast<std::int64_t>(length) + 1;
  if (static_cast<std::int64_t>(text.size()) < needed) {
    throw DataError(concat(path, ": has ", text.size(), " bytes of text, and a sequence with the byte after it has ",
                           needed, ".\n  Hint: use shorter sequences."));
  }
  text_ = bytes_of(text);
  constexpr std::int64_t kOneOf = 20;
  training_bytes_ = text_.numel() - text_.numel() / kOneOf;
  if (text_.numel() - training_bytes_ < needed || training_bytes_ < needed) training_bytes_ = text_.numel();
}

Batch TextData::sequences(const at::Tensor& starts) const {
  const at::Tensor ids = text_.index({starts.view({-1, 1}) + at::arange(length_ + 1, at::kLong)}).to(at::kLong);
  return {
      .args = {ids.narrow(1, 0, length_).contiguous()}, .kwargs = {}, .target = ids.narrow(1, 1, length_).contiguous()};
}

Batch TextData::batch(std::int64_t number) const {
  const RandomScope scope(seed_, number, /*microbatch=*/0, kSequences);
  return sequences(at::randint(training_bytes_ - length_, {rows_}, at::kLong));
}

// Takes sequences at even distances from the held-out part.
std::vector<Batch> TextData::held_out() const {
  constexpr int kMaxBatches = 4;
  const std::int64_t starts = text_.numel() - training_bytes_ - length_;
  if (starts <= 0) return {};
  const std::int64_t count = std::clamp<std::int64_t>(starts / length_ / rows_, 1, kMaxBatches);
  std::vector<Batch> batches;
  for (std::int64_t i = 0; i < count; ++i) {
    const at::Tensor numbers = at::arange(i * rows_, (i + 1) * rows_, at::kLong);
    batches.push_back(sequences(training_bytes_ + at::floor_divide(numbers * starts, count * rows_)));
  }
  return batches;
}

std::string TextData::fingerprint() const {
  const auto* const bytes = static_cast<const Bytef*>(text_.const_data_ptr());
  return concat(text_.numel(), " bytes, CRC-32 ", crc32_z(0, bytes, static_cast<std::size_t>(text_.numel())));
}

std::string TextData::description() const {
  return concat(path_, ", ", text_.numel(), " bytes");
}

}  // namespace penstock::internal
