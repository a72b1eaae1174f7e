// Reading of archives from untrusted sources: each is read as it was written, or refused with the reason.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/program/reader/exported_program.h"
#include "penstock/program/reader/pytree.h"
#include "tests/program/refused.h"
#include "tests/program/tensor_bytes.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

const std::string kHint = "\n  Hint: write the .pt2 with torch.export.save.";
const std::string kNoZip = "small: is not a .pt2: it is not a zip archive." + kHint;
const std::string kNoDirectory =
    "small: is not a zip archive, or is damaged: the directory at its end is missing." + kHint;

TEST(Archive, ReadsWhatWasWritten) {
  const std::string bytes = zipped(small_records());
  const Archive archive(bytes, "small");
  EXPECT_EQ(archive.name(), "small");
  EXPECT_EQ(archive.records().size(), 8U);
  EXPECT_EQ(archive.records().front(), "data/weights/weight_0");
  EXPECT_TRUE(archive.contains("byteorder"));
  EXPECT_FALSE(archive.contains("archive/byteorder"));
  EXPECT_EQ(archive.text("byteorder"), "little");
  EXPECT_EQ(archive.bytes("data/weights/weight_1").numel(), 16);
  EXPECT_EQ(read(bytes).run({at::ones({2, 3})}).toTensor().sum().item<double>(), 2.0 * (3 + 13 + 23 + 33));
}

TEST(Archive, IsNotNeededByTheProgramThatWasReadFromIt) {
  auto bytes = std::make_unique<std::string>(zipped(small_records()));
  const Program program = read(*bytes);
  std::fill(bytes->begin(), bytes->end(), 'x');
  bytes.reset();
  EXPECT_EQ(program.run({at::ones({2, 3})}).toTensor()[0][3].item<double>(), 33);
}

TEST(Archive, NamesAMissingFile) {
  expect_error<ProgramError>([] { const Archive archive("/nowhere/model.pt2"); },
                             "/nowhere/model.pt2: No such file or directory.");
}

TEST(Archive, NamesAFolder) {
  const Folder folder;
  expect_error<ProgramError>([&] { const Archive archive(folder.path().string()); },
                             folder.path().string() + ": is not a regular file.");
}

TEST(Archive, DoesNotWaitForAPipe) {
  const Folder folder;
  const std::string path = folder / "model.pt2";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto open = [&] {
    ::alarm(5);
    try {
      const Archive archive(path);
    } catch (const ProgramError& error) {
      ::_exit(std::string(error.what()) == path + ": is not a regular file." ? 0 : 1);
    }
    ::_exit(2);
  };
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(open(), ::testing::ExitedWithCode(0), "");
}

TEST(Archive, SaysWhatIsNoZip) {
  const Folder folder;
  for (const std::string bytes : {"", "P", "{\"model\": 1}", "\x80\x02}q"}) {
    const std::string path = folder.write("model.pt2", bytes);
    expect_error<ProgramError>([&] { const Archive archive(path); },
                               path + ": is not a .pt2: it is not a zip archive." + kHint);
  }
}

TEST(Archive, RefusesAZipThatIsNotOneOfPyTorchs) {
  for (const std::string& bytes : {std::string("PK"), std::string("PK\3\4 and no more")}) {
    expect_refused([&] { read(bytes); }, kNoDirectory);
  }
  expect_refused([&] { read(zipped({})); }, "small: is not a .pt2: it has no records." + kHint);
  // The record is not in a folder.
  std::string outside = zipped(small_records());
  for (std::size_t at = outside.find("archive/"); at != std::string::npos; at = outside.find("archive/", at)) {
    outside.replace(at, 8, "archive_");
  }
  expect_refused([&] { read(outside); },
                 "small: is not a .pt2: its record 'archive_models/model.json' is not in the folder archive_data/.");
}

// Reads Zip64 fields, and a comment at the end.
TEST(Archive, ReadsNumbersOf64Bits) {
  std::string bytes = zipped(small_records());
  const auto value = [&](std::size_t at, int count) {
    std::uint64_t read = 0;
    for (int i = count; i-- > 0;)
      read = read << 8U | static_cast<unsigned char>(bytes[at + static_cast<std::size_t>(i)]);
    return read;
  };
  // The first entry of the directory has its sizes and offset in an extra field, after another extra field.
  const std::size_t begin = bytes.find("PK\1\2");
  const std::string large = little_endian(0x7777, 2) + little_endian(3, 2) + "xyz" + little_endian(1, 2) +
                            little_endian(24, 2) + little_endian(value(begin + 24, 4), 8) +
                            little_endian(value(begin + 20, 4), 8) + little_endian(value(begin + 42, 4), 8);
  const std::size_t name = value(begin + 28, 2);
  bytes.replace(begin + 20, 8, std::string(8, '\xff'));
  bytes.replace(begin + 42, 4, std::string(4, '\xff'));
  bytes.replace(begin + 30, 2, little_endian(large.size(), 2));
  bytes.insert(begin + 46 + name, large);
  const std::size_t end = bytes.rfind("PK\5\6");
  const std::uint64_t records = value(end + 10, 2);
  std::string large_end = "PK\6\6" + little_endian(44, 8) + std::string(12, '\0') + little_endian(records, 8) +
                          little_endian(records, 8) + little_endian(end - begin, 8) + little_endian(begin, 8);
  large_end += "PK\6\7" + little_endian(0, 4) + little_endian(end, 8) + little_endian(1, 4);
  // The comment looks like another end record.
  const std::string comment = "PK\5\6" + std::string(30, '\xee');
  bytes = bytes.substr(0, end) + large_end + "PK\5\6" + little_endian(0, 4) + std::string(12, '\xff') +
          little_endian(comment.size(), 2) + comment;
  EXPECT_EQ(Archive(bytes, "small").records().size(), records);
  EXPECT_EQ(read(bytes).run({at::ones({2, 3})}).toTensor().sum().item<double>(), 2.0 * (3 + 13 + 23 + 33));
  // The entry claims a number of 64 bits, which is missing.
  bytes.replace(begin + 30, 2, little_endian(7, 2));
  expect_refused([&] { read(bytes); }, "small: archive/data/weights/weight_0 claims 4294967295 bytes");
}

TEST(Archive, SaysWhatIsWrongInItsDirectory) {
  const std::string whole = zipped(small_records());
  const std::size_t entry = whole.find("PK\1\2");
  const std::size_t end = whole.rfind("PK\5\6");
  const std::string first = "archive/data/weights/weight_0";
  struct Change {
    std::size_t at;
    std::string bytes;
    std::string message;
  };
  const std::vector<Change> changes = {
      {entry + 8, {'\1', '\0'}, first + " is encrypted."},
      {6, {'\1', '\0'}, first + " is encrypted."},
      {entry + 10, {'\10', '\0'}, first + " is compressed, which torch.export.save does not do."},
      {8, {'\10', '\0'}, first + " is compressed, which torch.export.save does not do."},
      {entry + 20, {'\1', '\0'}, first + " claims 48 bytes, and 1 are stored."},
      {entry + 42, {'\1', '\0'}, "is damaged: the header of " + first + " is not where it should be."},
      {26, {'\xff', '\xff'}, first + " reaches into the directory."},
      {entry, "KP", "is damaged: an entry of its directory is not where it should be."},
      {entry + 30, {'\xff', '\xff'}, "is damaged: its directory ends in the middle of an entry."},
      {entry + 46, "\n", "is damaged: the name of a record is empty or has control characters."},
      {end + 10, {'\7', '\0'}, "is damaged: found 8 records in its directory, expected 7."},
      {end + 19, "\x7f", "is damaged: its directory is not where it should be."},
      {end - 20, {'P', 'K', '\6', '\7'}, "is damaged: the end of its directory is not where it should be."},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.message);
    std::string changed = whole;
    changed.replace(change.at, change.bytes.size(), change.bytes);
    expect_error<ProgramError>([&] { const Archive archive(changed, "small"); }, "small: " + change.message + kHint);
  }
  std::vector<Record> twice = small_records();
  twice.push_back(twice.front());
  expect_error<ProgramError>([&] { read(twice); }, "small: it has two records 'data/weights/weight_0'." + kHint);
  std::string alone = zipped({{.name = "byteorder", .bytes = "little"}});
  for (const std::size_t at : {alone.find("archive/"), alone.rfind("archive/")}) alone[at + 7] = '_';
  expect_error<ProgramError>([&] { const Archive archive(alone, "small"); },
                             "small: is not a .pt2: its record 'archive_byteorder' is not in a folder." + kHint);
}

TEST(Archive, IsRefusedWhereverItIsCutShort) {
  const std::string whole = zipped(small_records());
  for (std::size_t size = 0; size < whole.size(); size += size < 40 || size + 100 > whole.size() ? 1 : 13) {
    SCOPED_TRACE(size);
    expect_refused([&] { read(whole.substr(0, size)); }, size < 2 ? kNoZip : kNoDirectory);
    if (HasFailure()) return;
  }
}

// Truncates an archive of Python at various lengths.
TEST(PythonsArchive, IsRefusedWhereverItIsCutShort) {
  const std::string whole = read_file(program_path("tied.pt2"));
  ASSERT_NO_THROW(read(whole));
  for (std::size_t size = 0; size < whole.size(); size += 97) {
    const std::string cut = whole.substr(0, size);
    // After a record that is itself an archive, there is the end of another directory.
    const bool has_end = cut.size() >= 22 && cut.substr(cut.size() - 22).starts_with("PK\5\6");
    expect_refused([&] { read(cut); }, size < 2 ? kNoZip : has_end ? "small: is damaged: " : kNoDirectory);
  }
}

TEST(Archive, WithAPieceCutOutIsRefused) {
  const std::string whole = zipped(small_records());
  for (std::size_t begin = 0; begin + 40 < whole.size(); begin += 61) {
    SCOPED_TRACE(begin);
    expect_refused([&] { read(std::string(whole).erase(begin, 40)); }, "small: ");
  }
}

// The directory has a checksum of each record, so that changed bytes are detected.
TEST(Archive, WithAnyByteChangedIsRefusedOrReadsTheSame) {
  const std::string whole = zipped(small_records());
  const NamedTensors right = read(whole).state_dict();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const unsigned change : {1U, 0x80U}) {
      SCOPED_TRACE(std::to_string(at) + " by " + std::to_string(change));
      std::string changed = whole;
      changed[at] = static_cast<char>(static_cast<unsigned char>(changed[at]) ^ change);
      try {
        const NamedTensors found = read(changed).state_dict();
        ASSERT_EQ(found.size(), right.size());
        for (std::size_t i = 0; i < right.size(); ++i) ASSERT_TRUE(same(right[i].second, found[i].second));
      } catch (const ProgramError& error) {
        ASSERT_TRUE(std::string(error.what()).starts_with("small: ")) << error.what();
      }
    }
  }
}

TEST(Archive, RefusesRecordsOutsideOfItsFolder) {
  for (const std::string name : {"../outside", "/etc/passwd", "data/../../outside", "..", "data/.."}) {
    std::vector<Record> records = small_records();
    records.push_back({.name = name, .bytes = "x"});
    expect_error<ProgramError>([&] { read(records); },
                               "small: its record '" + name + "' is outside of the archive." + kHint);
  }
  // These names stay inside.
  std::vector<Record> records = small_records();
  for (const std::string name : {"data/..weights", "a..b", "data/...", "..."}) {
    records.push_back({.name = name, .bytes = "x"});
  }
  EXPECT_NO_THROW(read(records));
}

TEST(Archive, RefusesARecordThatClaimsMoreThanThereIs) {
  for (const std::uint32_t claimed : {0x7fffffffU, 1'000'000U, 10'000U}) {
    std::vector<Record> records = small_records();
    find(records, "data/weights/weight_1")->claimed_size = claimed;
    const TensorBytes bytes;
    expect_records_refused(records, "small: ");
    EXPECT_LT(bytes.most(), 10'000);
  }
}

TEST(Archive, RefusesARecordThatIsShorterThanItsHeaderSays) {
  std::vector<Record> records = small_records();
  find(records, "data/weights/weight_1")->claimed_size = 17;
  expect_records_refused(records, "small: ");
}

TEST(Archive, RefusesBytesThatAreNotThoseThatWereWritten) {
  for (const std::string name : {"data/weights/weight_1", "models/model.json", "byteorder"}) {
    const std::vector<Record> records = small_records();
    std::string bytes = zipped(records);
    // Changes the second byte after the record's local header.
    const std::size_t at = bytes.find(name) + name.size() + 1;
    bytes[at] = static_cast<char>(bytes[at] + 1);
    const Archive archive(bytes, "small");
    const std::string message = "small: " + name + " is damaged: its checksum is wrong.";
    expect_error<ProgramError>([&] { archive.bytes(name); }, message);
    expect_error<ProgramError>([&] { archive.text(name); }, message);
  }
}

TEST(Archive, DoesNotUnpackMoreThanItHolds) {
  std::vector<Record> records = small_records();
  Record* const record = find(records, "data/weights/weight_0");
  record->method = 8;
  record->claimed_size = 1U << 30U;
  const TensorBytes bytes;
  expect_records_refused(records,
                         "small: archive/data/weights/weight_0 claims 1073741824 bytes, and all records have ");
  record->claimed_size = record->bytes.size();
  expect_records_refused(
      records, "small: archive/data/weights/weight_0 is compressed, which torch.export.save does not do." + kHint);
  EXPECT_LT(bytes.most(), 10'000);
}

// A small file cannot expand to much memory by overlapping records.
TEST(Archive, RefusesRecordsThatOverlap) {
  constexpr int kTimes = 500;
  constexpr int kNumbers = 50'000;
  json model = small_model();
  json weights = small_weights();
  weights["config"]["layer.bias"]["path_name"] = "weight_1";
  std::vector<Record> records;
  for (int i = 0; i < kTimes; ++i) {
    const std::string file = "copy_" + std::to_string(i);
    json meta = weights["config"]["layer.bias"];
    meta["path_name"] = file;
    meta["tensor_meta"] = tensor_meta({kNumbers});
    weights["config"]["more." + std::to_string(i)] = meta;
    Record record{.name = "data/weights/" + file, .bytes = std::string(kNumbers * sizeof(float), '\0')};
    if (i > 0) record.claimed_offset = 0;
    records.push_back(std::move(record));
  }
  for (Record& record : small_records(model, weights)) records.push_back(std::move(record));
  const std::string bytes = zipped(records);
  const TensorBytes of_tensors;
  expect_refused([&] { read(bytes); }, "small: its records '");
  EXPECT_LE(of_tensors.most(), static_cast<std::int64_t>(2 * bytes.size()));
}

}  // namespace
}  // namespace penstock::internal::testing
