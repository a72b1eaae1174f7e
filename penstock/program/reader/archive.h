// The archive that torch.export.save writes: a zip of records under one folder, uncompressed. It may come from anybody:
// what its headers claim is held against the bytes that there are before anything is allocated, and no record is ever
// written to a disk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

class Archive {
 public:
  // Throws ProgramError if `path` cannot be read, or is no such archive.
  explicit Archive(const std::string& path);
  // The same from bytes in memory, which must outlive it; `name` stands for the path in errors.
  Archive(std::string_view bytes, std::string name);
  ~Archive();
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;
  Archive(Archive&&) noexcept;
  Archive& operator=(Archive&&) noexcept;

  // Of the file.
  const std::string& name() const;
  // Without the folder, in the order of the archive.
  const std::vector<std::string>& records() const;
  bool contains(std::string_view record) const;

  // The bytes of a record, as text or as a tensor of bytes that owns them. Throws ProgramError if there is none, or if
  // they are not those that were written.
  std::string text(const std::string& record) const;
  at::Tensor bytes(const std::string& record) const;

  // Returns a checksum of all records: names, sizes and the checksums that the archive has of their bytes. No bytes are read.
  std::uint32_t checksum() const;

  // Writes a copy in which these records have other bytes, as many as before, with their checksums. All else is the same, so
  // every record keeps its place and alignment. `path` is replaced when all is on the disk. Throws ProgramError.
  void write_copy(const std::string& path, const std::map<std::string, at::Tensor>& replaced) const;

 private:
  struct Content;
  void open();
  std::string_view view(const std::string& record) const;

  std::unique_ptr<Content> content_;
};

}  // namespace penstock::internal
