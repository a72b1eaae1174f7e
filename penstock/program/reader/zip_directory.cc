#include "penstock/program/reader/zip_directory.h"

#include <algorithm>
#include <utility>

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

// A number that has no room in its field stands among the extra fields, under this number.
constexpr std::uint64_t kIsElsewhere = 0xffffffff;
constexpr std::uint64_t kLargeNumbers = 1;

constexpr std::uint64_t kEncrypted = 1;
// The checksum and the sizes stand behind the record's bytes, in a descriptor that may have a mark.
constexpr std::uint64_t kHasDescriptor = 8;
constexpr std::string_view kDescriptor = "PK\7\10";

// Some bytes of the archive, of which fields are read.
class Piece {
 public:
  // Throws unless there are so many bytes there, and they begin with the mark.
  Piece(std::string_view archive, std::uint64_t at, std::size_t size, std::string_view mark, const std::string& what) {
    if (at > archive.size() || archive.size() - at < size || !archive.substr(at).starts_with(mark)) {
      throw ZipError("is damaged: " + what + " is not where it should be.");
    }
    bytes_ = archive.substr(at, size);
  }
  explicit Piece(std::string_view bytes) : bytes_(bytes) {}

  // Little-endian, as all numbers of a zip are.
  std::uint64_t number(std::size_t at, std::size_t count) const {
    std::uint64_t number = 0;
    for (std::size_t i = count; i-- > 0;) number = number << 8U | static_cast<unsigned char>(bytes_[at + i]);
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

// It ends the archive, but for a comment of which it says the length. A record may itself be an archive.
std::size_t find_end(std::string_view archive) {
  for (std::size_t size = kEndSize; size <= std::min(archive.size(), kEndSize + kMostComment); ++size) {
    const std::string_view last = archive.substr(archive.size() - size);
    if (last.starts_with(kEnd) && Piece(last).number(20, 2) == size - kEndSize) return archive.size() - size;
  }
  throw ZipError("is not a zip archive, or is damaged: the directory at its end is missing.");
}

Directory find_directory(std::string_view archive) {
  const std::size_t at = find_end(archive);
  const Piece end(archive.substr(at));
  if (at < kLargeEndLocatorSize || !archive.substr(at - kLargeEndLocatorSize).starts_with(kLargeEndLocator)) {
    return {.begin = end.number(16, 4), .size = end.number(12, 4), .records = end.number(10, 2)};
  }
  const Piece locator(archive.substr(at - kLargeEndLocatorSize, kLargeEndLocatorSize));
  const Piece large(archive, locator.number(8, 8), kLargeEndSize, kLargeEnd, "the end of its directory");
  return {.begin = large.number(48, 8), .size = large.number(40, 8), .records = large.number(32, 8)};
}

// Of an entry's numbers, those that have no room in it, in this order.
struct LargeNumbers {
  std::uint64_t size = 0;
  std::uint64_t stored_size = 0;
  std::uint64_t header = 0;

  void read(std::string_view extra_fields) {
    std::vector<std::uint64_t*> wanted;
    for (std::uint64_t* const number : {&size, &stored_size, &header}) {
      if (*number == kIsElsewhere) wanted.push_back(number);
    }
    if (wanted.empty()) return;
    while (extra_fields.size() >= 4) {
      const Piece head(extra_fields.substr(0, 4));
      const Piece field(extra_fields.substr(4, head.number(2, 2)));
      extra_fields.remove_prefix(4 + field.size());
      if (head.number(0, 2) != kLargeNumbers || field.size() < 8 * wanted.size()) continue;
      for (std::size_t i = 0; i < wanted.size(); ++i) *wanted[i] = field.number(8 * i, 8);
      return;
    }
  }
};

// Names go into messages.
void require_readable(std::string_view name) {
  const auto cannot_be_read = [](char one) { return static_cast<unsigned char>(one) < 0x20 || one == 0x7f; };
  if (name.empty() || std::ranges::any_of(name, cannot_be_read)) {
    throw ZipError("is damaged: the name of a record is empty, or has bytes that are no text.");
  }
}

// `records` is the part of the archive in front of its directory.
ZipRecord read_record(std::string_view records, std::string name, const Piece& entry, std::string_view extra_fields) {
  require_readable(name);
  LargeNumbers numbers{.size = entry.number(24, 4), .stored_size = entry.number(20, 4), .header = entry.number(42, 4)};
  numbers.read(extra_fields);
  if (numbers.size > records.size()) {
    throw ZipError(name + " claims " + std::to_string(numbers.size) + " bytes, and all records have " +
                   std::to_string(records.size()) + ".");
  }
  const Piece header(records, numbers.header, kHeaderSize, kHeader, "the header of " + name);
  for (const std::uint64_t flags : {entry.number(8, 2), header.number(6, 2)}) {
    if ((flags & kEncrypted) != 0) throw ZipError(name + " is encrypted.");
  }
  for (const std::uint64_t method : {entry.number(10, 2), header.number(8, 2)}) {
    if (method != 0) throw ZipError(name + " is compressed, which torch.export.save does not do.");
  }
  if (numbers.size != numbers.stored_size) {
    throw ZipError(name + " claims " + std::to_string(numbers.size) + " bytes, and " +
                   std::to_string(numbers.stored_size) + " are stored.");
  }
  ZipRecord record{.name = std::move(name),
                   .header = numbers.header,
                   .begin = numbers.header + kHeaderSize + header.number(26, 2) + header.number(28, 2),
                   .size = numbers.size,
                   .checksum = static_cast<std::uint32_t>(entry.number(16, 4))};
  if (record.end() > records.size()) throw ZipError(record.name + " goes on behind the place of all records.");
  return record;
}

void refuse_one_place_for_two(const std::vector<ZipRecord>& records) {
  std::vector<const ZipRecord*> in_order;
  for (const ZipRecord& record : records) in_order.push_back(&record);
  std::ranges::sort(in_order, {}, &ZipRecord::header);
  for (std::size_t i = 1; i < in_order.size(); ++i) {
    if (in_order[i]->header >= in_order[i - 1]->end()) continue;
    throw ZipError("its records '" + in_order[i - 1]->name + "' and '" + in_order[i]->name + "' lie in one place.");
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
    const std::size_t place = directory.begin + directory.size - left.size();
    left.remove_prefix(kEntrySize);
    if (left.size() < name + extra + comment)
      throw ZipError("is damaged: its directory ends in the middle of an entry.");
    records.push_back(read_record(archive.substr(0, directory.begin), std::string(left.substr(0, name)), entry,
                                  left.substr(name, extra)));
    records.back().entry = place;
    left.remove_prefix(name + extra + comment);
  }
  if (records.size() != directory.records) {
    throw ZipError("is damaged: its directory has " + std::to_string(records.size()) + " records, and should have " +
                   std::to_string(directory.records) + ".");
  }
  refuse_one_place_for_two(records);
  return records;
}

ChecksumPlaces checksum_places(std::string_view archive, const ZipRecord& record) {
  const Piece header(archive, record.header, kHeaderSize, kHeader, "the header of " + record.name);
  ChecksumPlaces places{.directory = record.entry + 16, .own = record.header + 14};
  if ((header.number(6, 2) & kHasDescriptor) != 0) {
    places.own = record.end();
    if (archive.substr(places.own).starts_with(kDescriptor)) places.own += kDescriptor.size();
  }
  for (const std::size_t place : {places.directory, places.own}) {
    const Piece checksum(archive, place, 4, "", "the checksum of " + record.name);
    if (checksum.number(0, 4) == record.checksum) continue;
    throw ZipError("is damaged: the checksum of " + record.name + " is not where it should be.");
  }
  return places;
}

}  // namespace penstock::internal
