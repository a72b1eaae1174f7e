#include "penstock/program/reader/zip_directory.h"

#include <algorithm>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

constexpr std::string_view kEnd = "PK\5\6";
constexpr std::string_view kLargeEnd = "PK\6\6";
constexpr std::string_view kLargeEndLocator = "PK\6\7";
constexpr std::string_view kEntry = "PK\1\2";
constexpr std::string_view kHeader = "PK\3\4";

constexpr std::size_t kEndSize = 22;
constexpr std::size_t kLargeEndSize = 56;
constexpr std::size_t kLargeEndLocatorSize = 20;
constexpr std::size_t kEntrySize = 46;
constexpr std::size_t kHeaderSize = 30;
constexpr std::size_t kMostComment = 0xffff;

// Zip64: a field with this value has its number in the extra field with this ID.
constexpr std::uint64_t kInExtraField = 0xffffffff;
constexpr std::uint64_t kZip64Field = 1;

constexpr std::uint64_t kEncrypted = 1;
// The checksum and the sizes follow the record's bytes, in a data descriptor that may have a signature.
constexpr std::uint64_t kHasDescriptor = 8;
constexpr std::string_view kDescriptor = "PK\7\10";

// A structure of the archive, of which fields are read.
class Piece {
 public:
  // Throws ZipError unless the archive has `size` bytes at `offset`, and they begin with the signature.
  Piece(std::string_view archive, std::uint64_t offset, std::size_t size, std::string_view signature,
        const std::string& name) {
    if (offset > archive.size() || archive.size() - offset < size || !archive.substr(offset).starts_with(signature)) {
      throw ZipError(concat("is damaged: ", name, " is not where it should be."));
    }
    bytes_ = archive.substr(offset, size);
  }
  explicit Piece(std::string_view bytes) : bytes_(bytes) {}

  // Returns a little-endian number of `count` bytes.
  std::uint64_t number(std::size_t offset, std::size_t count) const {
    std::uint64_t number = 0;
    for (std::size_t i = count; i-- > 0;) number = number << 8U | static_cast<unsigned char>(bytes_[offset + i]);
    return number;
  }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
};

struct Directory {
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
  std::uint64_t records = 0;
};

// Returns the offset of the end record, which is followed by a comment of the length that it states. Its signature
// alone is not enough: a record may itself be an archive.
std::size_t find_end(std::string_view archive) {
  for (std::size_t size = kEndSize; size <= std::min(archive.size(), kEndSize + kMostComment); ++size) {
    const std::string_view last = archive.substr(archive.size() - size);
    if (last.starts_with(kEnd) && Piece(last).number(20, 2) == size - kEndSize) return archive.size() - size;
  }
  throw ZipError("is not a zip archive, or is damaged: the directory at its end is missing.");
}

Directory find_directory(std::string_view archive) {
  const std::size_t offset = find_end(archive);
  const Piece end(archive.substr(offset));
  if (offset < kLargeEndLocatorSize || !archive.substr(offset - kLargeEndLocatorSize).starts_with(kLargeEndLocator)) {
    return {.begin = end.number(16, 4), .size = end.number(12, 4), .records = end.number(10, 2)};
  }
  const Piece locator(archive.substr(offset - kLargeEndLocatorSize, kLargeEndLocatorSize));
  const Piece large(archive, locator.number(8, 8), kLargeEndSize, kLargeEnd, "the end of its directory");
  return {.begin = large.number(48, 8), .size = large.number(40, 8), .records = large.number(32, 8)};
}

// Numbers of an entry that may be in its Zip64 extra field, in the order that they have there.
struct EntryNumbers {
  std::uint64_t size = 0;
  std::uint64_t stored_size = 0;
  std::uint64_t header = 0;

  void read(std::string_view extra_fields) {
    std::vector<std::uint64_t*> wanted;
    for (std::uint64_t* const number : {&size, &stored_size, &header}) {
      if (*number == kInExtraField) wanted.push_back(number);
    }
    if (wanted.empty()) return;
    while (extra_fields.size() >= 4) {
      const Piece head(extra_fields.substr(0, 4));
      const Piece field(extra_fields.substr(4, head.number(2, 2)));
      extra_fields.remove_prefix(4 + field.size());
      if (head.number(0, 2) != kZip64Field || field.size() < 8 * wanted.size()) continue;
      for (std::size_t i = 0; i < wanted.size(); ++i) *wanted[i] = field.number(8 * i, 8);
      return;
    }
  }
};

// Throws ZipError for names with control characters, which would end up in messages.
void require_printable(std::string_view name) {
  const auto is_control = [](char character) {
    return static_cast<unsigned char>(character) < 0x20 || character == 0x7f;
  };
  if (name.empty() || std::ranges::any_of(name, is_control)) {
    throw ZipError("is damaged: the name of a record is empty or has control characters.");
  }
}

// `records` is the part of the archive before its directory.
ZipRecord read_record(std::string_view records, std::string name, const Piece& entry, std::string_view extra_fields) {
  require_printable(name);
  EntryNumbers numbers{.size = entry.number(24, 4), .stored_size = entry.number(20, 4), .header = entry.number(42, 4)};
  numbers.read(extra_fields);
  if (numbers.size > records.size()) {
    throw ZipError(concat(name, " claims ", numbers.size, " bytes, and all records have ", records.size(), "."));
  }
  const Piece header(records, numbers.header, kHeaderSize, kHeader, "the header of " + name);
  for (const std::uint64_t flags : {entry.number(8, 2), header.number(6, 2)}) {
    if ((flags & kEncrypted) != 0) throw ZipError(name + " is encrypted.");
  }
  for (const std::uint64_t method : {entry.number(10, 2), header.number(8, 2)}) {
    if (method != 0) throw ZipError(name + " is compressed, which torch.export.save does not do.");
  }
  if (numbers.size != numbers.stored_size) {
    throw ZipError(concat(name, " claims ", numbers.size, " bytes, and ", numbers.stored_size, " are stored."));
  }
  ZipRecord record{.name = std::move(name),
                   .header = numbers.header,
                   .begin = numbers.header + kHeaderSize + header.number(26, 2) + header.number(28, 2),
                   .size = numbers.size,
                   .checksum = static_cast<std::uint32_t>(entry.number(16, 4))};
  if (record.end() > records.size()) throw ZipError(record.name + " reaches into the directory.");
  return record;
}

void refuse_overlaps(const std::vector<ZipRecord>& records) {
  std::vector<const ZipRecord*> in_order;
  for (const ZipRecord& record : records) in_order.push_back(&record);
  std::ranges::sort(in_order, {}, &ZipRecord::header);
  for (std::size_t i = 1; i < in_order.size(); ++i) {
    if (in_order[i]->header >= in_order[i - 1]->end()) continue;
    throw ZipError(concat("its records '", in_order[i - 1]->name, "' and '", in_order[i]->name, "' overlap."));
  }
}

}  // namespace

std::vector<ZipRecord> read_zip_directory(std::string_view archive) {
  const Directory directory = find_directory(archive);
  if (directory.begin > archive.size() || directory.size > archive.size() - directory.begin) {
    throw ZipError("is damaged: its directory is not where it should be.");
  }
  std::string_view left = archive.substr(directory.begin, directory.size);
  std::vector<ZipRecord> records;
  while (!left.empty()) {
    const Piece entry(left, 0, kEntrySize, kEntry, "an entry of its directory");
    const std::size_t name = entry.number(28, 2);
    const std::size_t extra = entry.number(30, 2);
    const std::size_t comment = entry.number(32, 2);
    const std::size_t offset = directory.begin + directory.size - left.size();
    left.remove_prefix(kEntrySize);
    if (left.size() < name + extra + comment)
      throw ZipError("is damaged: its directory ends in the middle of an entry.");
    records.push_back(read_record(archive.substr(0, directory.begin), std::string(left.substr(0, name)), entry,
                                  left.substr(name, extra)));
    records.back().entry = offset;
    left.remove_prefix(name + extra + comment);
  }
  if (records.size() != directory.records) {
    throw ZipError(
        concat("is damaged: found ", records.size(), " records in its directory, expected ", directory.records, "."));
  }
  refuse_overlaps(records);
  return records;
}

ChecksumOffsets checksum_offsets(std::string_view archive, const ZipRecord& record) {
  const Piece header(archive, record.header, kHeaderSize, kHeader, "the header of " + record.name);
  ChecksumOffsets offsets{.directory = record.entry + 16, .local = record.header + 14};
  if ((header.number(6, 2) & kHasDescriptor) != 0) {
    offsets.local = record.end();
    if (archive.substr(offsets.local).starts_with(kDescriptor)) offsets.local += kDescriptor.size();
  }
  for (const std::size_t offset : {offsets.directory, offsets.local}) {
    const Piece checksum(archive, offset, 4, "", "the checksum of " + record.name);
    if (checksum.number(0, 4) == record.checksum) continue;
    throw ZipError(concat("is damaged: the checksum of ", record.name, " is not where it should be."));
  }
  return offsets;
}

}  // namespace penstock::internal
