// Training data: numbered batches, and held-out ones that are never trained on.
#include "penstock/train/data.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "penstock/train/gpt.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

std::string row_text(const at::Tensor& ids, std::int64_t row) {
  std::string text;
  for (std::int64_t i = 0; i < ids.size(1); ++i) text.push_back(static_cast<char>(ids[row][i].item<std::int64_t>()));
  return text;
}

// Returns the two numbers of each row, in ascending order.
std::set<std::pair<int, int>> pairs_of(const Batch& batch, int digits) {
  std::set<std::pair<int, int>> pairs;
  const at::Tensor ids = batch.args[0].toTensor();
  for (std::int64_t row = 0; row < ids.size(0); ++row) {
    const std::string text = row_text(ids, row);
    const auto width = static_cast<std::size_t>(digits);
    pairs.emplace(std::minmax({std::stoi(text.substr(0, width)), std::stoi(text.substr(width + 1, width))}));
  }
  return pairs;
}

TEST(AdditionData, HasCorrectSums) {
  const AdditionData data(/*digits=*/3, /*rows=*/50, /*seed=*/1);
  const Batch batch = data.batch(7);
  const at::Tensor ids = batch.args[0].toTensor();
  const at::Tensor target = batch.target.toTensor();
  ASSERT_EQ(ids.sizes(), (std::vector<std::int64_t>{50, data.length()}));
  ASSERT_EQ(target.sizes(), ids.sizes());
  for (std::int64_t row = 0; row < 50; ++row) {
    const std::string text = row_text(ids, row);
    std::string sum;
    for (std::int64_t i = 0; i < target.size(1); ++i) {
      const auto byte = target[row][i].item<std::int64_t>();
      EXPECT_EQ(byte == -100, i < 7);
      if (i >= 7) sum.push_back(static_cast<char>(byte));
    }
    EXPECT_EQ(text[3], '+');
    EXPECT_EQ(text[7], '=');
    EXPECT_EQ(std::stoi(text.substr(0, 3)) + std::stoi(text.substr(4, 3)), std::stoi(sum)) << text << " " << sum;
    EXPECT_EQ(text.substr(8), sum.substr(0, 3));
  }
}

TEST(AdditionData, GivesTheSameBatchForTheSameNumber) {
  const AdditionData data(2, 16, 1);
  const AdditionData again(2, 16, 1);
  const AdditionData other(2, 16, 2);
  const auto ids = [](const Batch& batch) { return batch.args[0].toTensor(); };
  EXPECT_TRUE(same(ids(data.batch(3)), ids(again.batch(3))));
  EXPECT_FALSE(at::equal(ids(data.batch(3)), ids(data.batch(4))));
  EXPECT_FALSE(at::equal(ids(data.batch(3)), ids(other.batch(3))));
}

TEST(AdditionData, NeverTrainsOnWhatIsHeldOut) {
  const AdditionData data(/*digits=*/2, /*rows=*/64, /*seed=*/3);
  std::set<std::pair<int, int>> held_out;
  for (const Batch& batch : data.held_out()) held_out.merge(pairs_of(batch, 2));
  EXPECT_GT(held_out.size(), 100U);
  for (int number = 0; number < 200; ++number) {
    for (const auto& pair : pairs_of(data.batch(number), 2)) EXPECT_FALSE(held_out.contains(pair)) << pair.first;
  }
}

TEST(AdditionData, CountsCorrectSums) {
  const AdditionData data(2, 4, 1);
  const Batch batch = data.batch(0);
  const at::Tensor target = batch.target.toTensor();
  const at::Tensor output = at::one_hot(target.clamp(0), kVocabulary).to(at::kFloat);
  EXPECT_EQ(data.right_sums(batch, output), 4);
  const std::string first = data.written(batch, output, 0);
  EXPECT_EQ(std::stoi(first.substr(0, 2)) + std::stoi(first.substr(3, 2)), std::stoi(first.substr(6))) << first;
  // One digit of one sum is wrong now.
  output[2][data.length() - 1].zero_();
  EXPECT_EQ(data.right_sums(batch, output), 3);
}

TEST(AdditionData, RefusesNumbersThatAreTooLong) {
  expect_error<DataError>([] { AdditionData(0, 1, 1); }, "additions of numbers with 0 digits: expected 1 to 17.");
  EXPECT_NO_THROW(AdditionData(17, 2, 1).batch(0));
}

TEST(TextData, HasSequencesWithTheByteAfterEach) {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 2000; ++i) text.push_back(static_cast<char>('a' + i % 26));
  const TextData data(folder.write("text", text), /*length=*/10, /*rows=*/5, /*seed=*/1);
  const Batch batch = data.batch(0);
  const at::Tensor ids = batch.args[0].toTensor();
  const at::Tensor target = batch.target.toTensor();
  EXPECT_EQ(ids.sizes(), (std::vector<std::int64_t>{5, 10}));
  for (std::int64_t row = 0; row < 5; ++row) EXPECT_NE(text.find(row_text(ids, row)), std::string::npos);
  EXPECT_TRUE(same(ids.narrow(1, 1, 9).contiguous(), target.narrow(1, 0, 9).contiguous()));
  EXPECT_EQ(data.size_of(batch), 50);
  EXPECT_FALSE(data.held_out().empty());
  EXPECT_EQ(data.description(), folder / "text" + ", 2000 bytes");
}

TEST(TextData, HasAFingerprintOfItsContents) {
  const Folder folder;
  const auto fingerprint = [&](const std::string& name, const std::string& text) {
    return TextData(folder.write(name, text), /*length=*/4, /*rows=*/1, /*seed=*/1).fingerprint();
  };
  EXPECT_EQ(fingerprint("a", "hello world"), fingerprint("b", "hello world"));
  EXPECT_NE(fingerprint("a", "hello world"), fingerprint("b", "hello vorld"));
}

TEST(TextData, IsAllFilesOfADirectoryInOrder) {
  const Folder folder;
  folder.write("b", "world");
  folder.write("a", "hello ");
  const TextData data(folder.path(), /*length=*/10, /*rows=*/1, /*seed=*/1);
  EXPECT_EQ(row_text(data.batch(0).args[0].toTensor(), 0), "hello worl");
  // The text is too short to hold something out.
  EXPECT_TRUE(data.held_out().empty());
}

TEST(TextData, NamesAMissingOrTooShortFile) {
  const Folder folder;
  expect_error<DataError>([&] { TextData(folder / "none", 4, 1, 1); },
                          folder / "none" + ": there is no such file or directory.");
  expect_error<DataError>([&] { TextData(folder.write("short", "abc"), 4, 1, 1); },
                          folder / "short" +
                              ": has 3 bytes of text, and a sequence with the byte after it has 5.\n  Hint: use "
                              "shorter sequences.");
}

}  // namespace
}  // namespace penstock::internal::testing
