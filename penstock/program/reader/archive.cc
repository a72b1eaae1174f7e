#include "penstock/program/reader/archive.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/zip_directory.h"
#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/tensor/mapped_file.h"

namespace penstock::internal {
namespace {

std::unique_ptr<MappedFile> mapped(const std::string& path) {
  try {
    return std::make_unique<MappedFile>(path, FileAccess::MapReadOnly);
  } catch (const MappingError& failure) {
    const bool is_file =
        failure.reason() == MappingError::Reason::Open || failure.reason() == MappingError::Reason::Map;
    throw ProgramError(
        concat(path, ": ", is_file ? std::generic_category().message(failure.code()) : "is not a regular file", "."));
  }
}

// Returns true for a path that would escape the folder it is extracted to. Records are never extracted here, but such
// an archive is an attack on somebody.
bool escapes_folder(std::string_view record) {
  return record.starts_with('/') || record == ".." || record.starts_with("../") ||
         record.find("/../") != std::string_view::npos || record.ends_with("/..");
}

}  // namespace

struct Archive::Content {
  std::string name;
  std::unique_ptr<MappedFile> mapping;
  std::string_view bytes;
  std::vector<std::string> records;
  std::map<std::string, ZipRecord, std::less<>> places;

  [[noreturn]] void refuse(const std::string& why) const {
    throw ProgramError(concat(name, ": ", why, "\n  Hint: write the .pt2 with torch.export.save."));
  }
};

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
  std::vector<ZipRecord> records;
  try {
    records = read_zip_directory(content_->bytes);
  } catch (const ZipError& error) {
    content_->refuse(error.what());
  }
  if (records.empty()) content_->refuse("is not a .pt2: it has no records.");
  const std::string folder = records.front().name.substr(0, records.front().name.find('/') + 1);
  for (ZipRecord& record : records) {
    if (folder.empty()) content_->refuse(concat("is not a .pt2: its record '", record.name, "' is not in a folder."));
    if (!record.name.starts_with(folder)) {
      content_->refuse(concat("is not a .pt2: its record '", record.name, "' is not in the folder ", folder, "."));
    }
    std::string name = record.name.substr(folder.size());
    if (escapes_folder(name)) content_->refuse(concat("its record '", name, "' is outside of the archive."));
    content_->records.push_back(name);
    if (!content_->places.emplace(name, std::move(record)).second) {
      content_->refuse(concat("it has two records '", name, "'."));
    }
  }
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

std::uint32_t Archive::checksum() const {
  std::string text;
  for (const auto& [name, record] : content_->places) {
    text += concat(name, " ", record.size, " ", record.checksum, "\n");
  }
  return static_cast<std::uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

std::string_view Archive::unchecked_view(const std::string& record) const {
  const auto found = content_->places.find(record);
  if (found == content_->places.end()) throw ProgramError(concat(content_->name, ": has no record ", record, "."));
  return content_->bytes.substr(found->second.begin, found->second.size);
}

void Archive::refuse_damaged(const std::string& record) const {
  throw ProgramError(concat(content_->name, ": ", record, " is damaged: its checksum is wrong."));
}

std::string_view Archive::view(const std::string& record) const {
  const std::string_view bytes = unchecked_view(record);
  const auto checksum = crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  if (checksum != content_->places.find(record)->second.checksum) refuse_damaged(record);
  return bytes;
}

std::string Archive::text(const std::string& record) const {
  return std::string(view(record));
}

at::Tensor Archive::bytes(const std::string& record) const {
  constexpr std::size_t kPiece = 16U << 20U;
  std::string_view from = unchecked_view(record);
  at::Tensor result = at::empty({static_cast<std::int64_t>(from.size())}, at::kByte);
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  std::uint64_t checksum = 0;
  while (!from.empty()) {
    const std::string_view piece = from.substr(0, kPiece);
    std::memcpy(to, piece.data(), piece.size());
    checksum = crc32_z(checksum, reinterpret_cast<const Bytef*>(to), piece.size());
    if (content_->mapping) content_->mapping->release_pages(piece);
    to += piece.size();
    from.remove_prefix(piece.size());
  }
  if (checksum != content_->places.find(record)->second.checksum) refuse_damaged(record);
  return result;
}

at::Tensor Archive::view_bytes(const std::shared_ptr<const Archive>& archive, const std::string& record) {
  const std::string_view bytes = archive->unchecked_view(record);
  // Weights::load gives a tensor memory of its own before anything may write to it.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  return at::from_blob(
      const_cast<char*>(bytes.data()), {static_cast<std::int64_t>(bytes.size())}, [archive](void*) {},
      at::TensorOptions(at::kByte));
}

bool Archive::is_file() const {
  return content_->mapping != nullptr;
}

void Archive::write_copy(const std::string& path, const std::map<std::string, at::Tensor>& replaced) const {
  // Offsets of the headers and directory entries of all records.
  std::set<std::size_t> begins;
  for (const auto& [name, record] : content_->places) begins.insert({record.header, record.entry});
  // New bytes by offset.
  std::map<std::size_t, std::string_view> patches;
  std::list<std::string> checksums;
  for (const auto& [name, tensor] : replaced) {
    const auto found = content_->places.find(name);
    if (found == content_->places.end()) throw ProgramError(concat(content_->name, ": has no record ", name, "."));
    const ZipRecord& record = found->second;
    if (!tensor.is_contiguous() || tensor.nbytes() != record.size) {
      throw ProgramError(concat(content_->name, ": ", name, ": found ", tensor.nbytes(),
                                " bytes to replace it, expected ", record.size, "."));
    }
    const std::string_view bytes(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    if (!bytes.empty()) patches.emplace(record.begin, bytes);
    const std::uint64_t checksum = crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
    std::string& text = checksums.emplace_back();
    for (const unsigned shift : {0U, 8U, 16U, 24U}) text.push_back(static_cast<char>(checksum >> shift & 0xffU));
    try {
      const ChecksumOffsets offsets = checksum_offsets(content_->bytes, record);
      const auto next = begins.lower_bound(record.end());
      if (offsets.local >= record.end() && next != begins.end() && *next < offsets.local + text.size()) {
        throw ZipError(concat("is damaged: another record overlaps the checksum of ", record.name, "."));
      }
      patches.emplace(offsets.local, text);
      patches.emplace(offsets.directory, text);
    } catch (const ZipError& error) {
      content_->refuse(error.what());
    }
  }
  try {
    AtomicFileWriter file(path);
    std::size_t written = 0;
    for (const auto& [offset, bytes] : patches) {
      file.write(content_->bytes.data() + written, offset - written);
      file.write(bytes.data(), bytes.size());
      written = offset + bytes.size();
    }
    file.write(content_->bytes.data() + written, content_->bytes.size() - written);
    file.commit();
  } catch (const AtomicFileWriter::Error& failure) {
    throw ProgramError(failure.what());
  }
}

}  // namespace penstock::internal
