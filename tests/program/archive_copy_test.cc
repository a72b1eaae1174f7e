// Copies of an archive with new weights.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/program.h"
#include "penstock/program/reader/zip_directory.h"
#include "tests/program/archives.h"
#include "tests/program/programs.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

namespace {

NamedTensors doubled(const NamedTensors& tensors) {
  NamedTensors result = copies(tensors);
  for (auto& [name, tensor] : result) tensor.mul_(2).add_(1);
  return result;
}

// PyTorch writes a zip with data descriptors after the records.
TEST(ArchiveCopy, HasTheWeightsAndNothingElseChanged) {
  const Folder folder;
  for (const std::string name : {"tied", "norms", "expanded_buffer", "masked"}) {
    SCOPED_TRACE(name);
    Program program(program_path(name + ".pt2"));
    const NamedTensors state = doubled(program.state_dict());
    program.load_state_dict(state);
    const std::string path = folder / (name + ".pt2");
    program.save(path);
    expect_equal(state, copies(Program(path).state_dict()));
    // Every record keeps its offset, and records without weights are unchanged.
    const std::string before = read_file(program.name());
    const std::string after = read_file(path);
    ASSERT_EQ(before.size(), after.size());
    const std::vector<ZipRecord> old_records = read_zip_directory(before);
    const std::vector<ZipRecord> new_records = read_zip_directory(after);
    ASSERT_EQ(old_records.size(), new_records.size());
    for (std::size_t i = 0; i < old_records.size(); ++i) {
      EXPECT_EQ(old_records[i].name, new_records[i].name);
      EXPECT_EQ(old_records[i].begin, new_records[i].begin);
      const std::string bytes = after.substr(new_records[i].begin, new_records[i].size);
      EXPECT_EQ(checksum(bytes), new_records[i].checksum);
      const bool is_weight = old_records[i].name.find("/weights/weight_") != std::string::npos;
      if (is_weight) continue;
      EXPECT_EQ(before.substr(old_records[i].begin, old_records[i].size), bytes) << old_records[i].name;
    }
  }
  EXPECT_EQ(folder.files(), 4U);
}

// This zip has the checksums in the local headers.
TEST(ArchiveCopy, ChangesTheChecksumsOfHeaders) {
  const Folder folder;
  const std::string bytes = zipped(small_records());
  const Archive archive(bytes, "small");
  Program program = Program::from_bytes(bytes, "small");
  const NamedTensors state = doubled(program.state_dict());
  program.load_state_dict(state);
  archive.write_copy(folder / "copy.pt2", state_of(program).weights->records());
  expect_equal(state, Program(folder / "copy.pt2").state_dict());
  const std::string copy = read_file(folder / "copy.pt2");
  for (const ZipRecord& record : read_zip_directory(copy)) {
    const ChecksumOffsets offsets = checksum_offsets(copy, record);
    EXPECT_EQ(offsets.local, record.header + 14);
    EXPECT_EQ(record.checksum, checksum(copy.substr(record.begin, record.size))) << record.name;
  }
}

TEST(ProgramSave, RefusesAProgramThatWasReadFromMemory) {
  const Folder folder;
  const Program program = Program::from_bytes(zipped(small_records()), "small");
  expect_error<ProgramError>([&] { program.save(folder / "copy.pt2"); },
                             "small: was read from memory, so there is no file to copy.\n  Hint: read it from a file.");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(ProgramSave, RefusesAFileThatHasChanged) {
  const Folder folder;
  const std::string path = folder.write("small.pt2", zipped(small_records()));
  const Program program(path);
  program.save(folder / "copy.pt2");
  std::vector<Record> records = small_records();
  find(records, "data/weights/weight_0")->bytes.front() ^= 1;
  folder.write("small.pt2", zipped(records));
  expect_error<ProgramError>([&] { program.save(folder / "other.pt2"); },
                             path + ": has changed since the program was read.\n  Hint: read it again.");
  EXPECT_EQ(folder.files(), 2U);
}

TEST(ProgramSave, ReplacesItsOwnFileAsOftenAsItIsAsked) {
  const Folder folder;
  const std::string path = folder.write("small.pt2", zipped(small_records()));
  const Program program(path);
  for (int round = 1; round <= 2; ++round) {
    for (const auto& [name, tensor] : program.state_dict()) tensor.detach().fill_(round);
    program.save(path);
    for (const auto& [name, tensor] : Program(path).state_dict())
      EXPECT_TRUE(tensor.eq(round).all().item<bool>()) << name;
  }
}

TEST(ArchiveCopy, RefusesOtherSizesAndUnknownRecords) {
  const Folder folder;
  const std::string bytes = zipped(small_records());
  const Archive archive(bytes, "small");
  expect_error<ProgramError>([&] { archive.write_copy(folder / "copy.pt2", {{"none", at::ones({1})}}); },
                             "small: has no record none.");
  expect_error<ProgramError>([&] { archive.write_copy(folder / "copy.pt2", {{"byteorder", at::ones({2})}}); },
                             "small: byteorder: found 8 bytes to replace it, expected 6.");
  expect_error<ProgramError>([&] { archive.write_copy(folder / "none/copy.pt2", {}); },
                             folder / "none/copy.pt2" +
                                 ": could not be written, as its directory could not be opened: No "
                                 "such file or directory.");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(ArchiveCopy, RefusesAChecksumThatIsNotWhereItShouldBe) {
  const Folder folder;
  std::string bytes = zipped(small_records());
  const ZipRecord record = read_zip_directory(bytes).front();
  const auto refused = [&](const std::string& message) {
    const Archive archive(bytes, "small");
    const Program program = Program::from_bytes(bytes, "small");
    const auto& weights = state_of(program).weights->records();
    expect_error<ProgramError>([&] { archive.write_copy(folder / "copy.pt2", weights); },
                               "small: " + message + "\n  Hint: write the .pt2 with torch.export.save.");
  };
  // The header claims a data descriptor, which is missing.
  bytes[record.header + 6] = 8;
  refused("is damaged: the checksum of " + record.name + " is not where it should be.");
  bytes[record.header + 6] = 0;
  bytes[record.header + 14] ^= 1;
  refused("is damaged: the checksum of " + record.name + " is not where it should be.");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(ArchiveCopy, RefusesARecordThatOverlapsAChecksum) {
  const Folder folder;
  std::string bytes = zipped(small_records());
  const std::vector<ZipRecord> records = read_zip_directory(bytes);
  ASSERT_EQ(records[0].end(), records[1].header);
  // The checksum of the first record would be in the header of the second.
  bytes[records[0].header + 6] = 8;
  bytes.replace(records[0].entry + 16, 4, bytes.substr(records[1].header, 4));
  const Archive archive(bytes, "small");
  expect_error<ProgramError>(
      [&] { archive.write_copy(folder / "copy.pt2", {{"data/weights/weight_0", at::zeros({12})}}); },
      "small: is damaged: another record overlaps the checksum of archive/data/weights/weight_0.\n"
      "  Hint: write the .pt2 with torch.export.save.");
  EXPECT_EQ(folder.files(), 0U);
}

}  // namespace
}  // namespace penstock::internal::testing
