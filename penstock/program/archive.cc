#include "penstock/program/archive.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/tensor/mapped_file.h"

namespace penstock {
namespace {

std::unique_ptr<MappedFile> mapped(const std::string& path) {
  try {
    return std::make_unique<MappedFile>(path);
  } catch (const MappingFailure& failure) {
    const bool is_file = failure.why == MappingFailure::Why::Open || failure.why == MappingFailure::Why::Map;
    throw ProgramError(path + ": " +
                       (is_file ? std::generic_category().message(failure.code) : "is not a regular file") + ".");
  }
}

class ReadMemory final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit ReadMemory(std::string_view bytes) : bytes_(bytes) {}

  std::size_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t position, void* to, std::size_t count, const char* /*what*/) const override {
    if (position >= bytes_.size()) return 0;
    const std::size_t there = std::min(count, bytes_.size() - static_cast<std::size_t>(position));
    std::memcpy(to, bytes_.data() + position, there);
    return there;
  }

 private:
  std::string_view bytes_;
};

// libtorch's messages go on with where in its own sources they were thrown.
std::string first_line(const std::exception& error) {
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

// Where a record lies: its header, and behind that its bytes.
struct Place {
  std::size_t header = 0;
  std::size_t begin = 0;
  std::size_t size = 0;

  std::size_t end() const { return begin + size; }
};

std::uint32_t number_at(std::string_view bytes, std::size_t at, std::size_t count) {
  std::uint32_t number = 0;
  for (std::size_t i = count; i-- > 0;) number = number << 8U | static_cast<unsigned char>(bytes[at + i]);
  return number;
}

// What the wheel's reader does not look at: whether a record is compressed, and the checksum of its bytes. It stands in
// the record's header, or behind the record where the header says that it was written before the bytes were known.
constexpr std::size_t kFlagsInHeader = 6;
constexpr std::size_t kMethodInHeader = 8;
constexpr std::size_t kChecksumInHeader = 14;
constexpr std::uint32_t kChecksumIsBehind = 8;

bool is_compressed(std::string_view archive, const Place& place) {
  return number_at(archive, place.header + kMethodInHeader, 2) != 0;
}

bool is_as_written(std::string_view archive, const Place& place) {
  std::size_t at = place.header + kChecksumInHeader;
  if ((number_at(archive, place.header + kFlagsInHeader, 2) & kChecksumIsBehind) != 0) {
    at = place.end() + (archive.substr(place.end()).starts_with("PK\7\10") ? 4 : 0);
    if (archive.size() < at + 4) return false;
  }
  const std::string_view record = archive.substr(place.begin, place.size);
  return crc32_z(0, reinterpret_cast<const Bytef*>(record.data()), record.size()) == number_at(archive, at, 4);
}

}  // namespace

struct Archive::Content {
  std::string name;
  std::unique_ptr<MappedFile> mapping;
  std::string_view bytes;
  std::vector<std::string> records;
  std::map<std::string, Place, std::less<>> places;

  [[noreturn]] void refuse(const std::string& why) const {
    throw ProgramError(name + ": " + why + "\n  Hint: a .pt2 is what torch.export.save writes.");
  }
  // Throws unless `record` lies in the archive, as it is.
  Place place_of(caffe2::serialize::PyTorchStreamReader& reader, const std::string& record) const;
  void refuse_one_place_for_two() const;
};

Place Archive::Content::place_of(caffe2::serialize::PyTorchStreamReader& reader, const std::string& record) const {
  Place place;
  try {
    place = {.header = reader.getRecordHeaderOffset(record),
             .begin = reader.getRecordOffset(record),
             .size = reader.getRecordSize(record)};
  } catch (const std::exception& error) {
    refuse(record + " cannot be read: " + first_line(error));
  }
  if (place.begin > bytes.size() || place.size > bytes.size() - place.begin) {
    refuse(record + " claims " + std::to_string(place.size) + " bytes, and the whole archive has " +
           std::to_string(bytes.size()) + ".");
  }
  if (is_compressed(bytes, place)) refuse(record + " is compressed, which torch.export.save does not do.");
  return place;
}

// One place under many names would make much of a small archive.
void Archive::Content::refuse_one_place_for_two() const {
  std::vector<std::pair<Place, std::string_view>> in_order;
  for (const auto& [record, place] : places) in_order.emplace_back(place, record);
  std::ranges::sort(in_order, {}, [](const auto& one) { return one.first.header; });
  for (std::size_t i = 1; i < in_order.size(); ++i) {
    if (in_order[i].first.header >= in_order[i - 1].first.end()) continue;
    refuse("its records '" + std::string(in_order[i - 1].second) + "' and '" + std::string(in_order[i].second) +
           "' lie in one place.");
  }
}

Archive::Archive(const std::string& path) : content_(std::make_unique<Content>()) {
  content_->name = path;
  content_->mapping = mapped(path);
  content_->bytes = content_->mapping->bytes();
  open();
}

Archive::Archive(std::string_view bytes, std::string name) : content_(std::make_unique<Content>()) {
  content_->name = std::move(name);
  content_->bytes = bytes;
  open();
}

Archive::~Archive() = default;
Archive::Archive(Archive&&) noexcept = default;
Archive& Archive::operator=(Archive&&) noexcept = default;

void Archive::open() {
  if (!content_->bytes.starts_with("PK")) content_->refuse("is not a .pt2: it is not a zip archive.");
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader;
  try {
    reader = std::make_unique<caffe2::serialize::PyTorchStreamReader>(std::make_shared<ReadMemory>(content_->bytes));
    content_->records = reader->getAllRecords();
  } catch (const std::exception& error) {
    content_->refuse("is not a .pt2, or is damaged: " + first_line(error));
  }
  for (const std::string& record : content_->records) {
    const bool leaves = record.starts_with('/') || record == ".." || record.starts_with("../") ||
                        record.find("/../") != std::string::npos || record.ends_with("/..");
    if (leaves) content_->refuse("its record '" + record + "' lies outside of the archive.");
    if (!content_->places.emplace(record, content_->place_of(*reader, record)).second) {
      content_->refuse("it has two records '" + record + "'.");
    }
  }
  content_->refuse_one_place_for_two();
}

const std::string& Archive::name() const {
  return content_->name;
}

const std::vector<std::string>& Archive::records() const {
  return content_->records;
}

bool Archive::contains(std::string_view record) const {
  return content_->places.contains(record);
}

std::string_view Archive::view(const std::string& record) const {
  const auto found = content_->places.find(record);
  if (found == content_->places.end()) throw ProgramError(content_->name + ": has no record " + record + ".");
  if (!is_as_written(content_->bytes, found->second)) {
    throw ProgramError(content_->name + ": " + record + " is damaged: its bytes do not have their checksum.");
  }
  return content_->bytes.substr(found->second.begin, found->second.size);
}

std::string Archive::text(const std::string& record) const {
  return std::string(view(record));
}

at::Tensor Archive::bytes(const std::string& record) const {
  const std::string_view from = view(record);
  at::Tensor result = at::empty({static_cast<std::int64_t>(from.size())}, at::kByte);
  if (!from.empty()) std::memcpy(result.mutable_data_ptr(), from.data(), from.size());
  return result;
}

}  // namespace penstock
