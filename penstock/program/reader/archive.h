// The archive that torch.export.save writes: a zip of uncompressed records in one folder. It may come from an untrusted
// source: the sizes in its headers are checked against the size of the file before anything is allocated, and no record
// is extracted to disk.
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
  // Maps a file. Throws ProgramError if it cannot be read or is not such an archive.
  explicit Archive(const std::string& path);
  // Uses bytes in memory, which have to outlive the archive. Errors show `name` in place of a path.
  Archive(std::string_view bytes, std::string name);
  ~Archive();
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;
  Archive(Archive&&) noexcept;
  Archive& operator=(Archive&&) noexcept;

  // Returns the path of the file.
  const std::string& name() const;
  // Returns the names of the records without the folder, in the order of the archive.
  const std::vector<std::string>& records() const;
  bool contains(std::string_view record) const;

  // Return a copy of a record's bytes. Throws ProgramError if there is no such record or its checksum is wrong. bytes()
  // leaves no pages of the record in the mapping but those at the ends of its pieces.
  std::string text(const std::string& record) const;
  at::Tensor bytes(const std::string& record) const;
  // Returns a record's bytes where they lie in the archive, which the tensor keeps alive. Nothing is read, and the
  // checksum is not compared. Throws ProgramError if there is no such record.
  static at::Tensor view_bytes(const std::shared_ptr<const Archive>& archive, const std::string& record);
  // True if the archive is a mapped file, and not bytes in memory that belong to the caller.
  bool is_file() const;

  // Returns a checksum of all records' names, sizes and stored checksums. Does not read the records.
  std::uint32_t checksum() const;

  // Writes a copy of the archive with the bytes of some records replaced. Sizes do not change, so every record keeps
  // its offset and alignment. Replaces `path` atomically, once all data is on disk. Throws ProgramError.
  void write_copy(const std::string& path, const std::map<std::string, at::Tensor>& replaced) const;

 private:
  struct Content;
  void open();
  // Returns the bytes of a record in the archive, with and without a check of the checksum.
  std::string_view view(const std::string& record) const;
  std::string_view unchecked_view(const std::string& record) const;
  [[noreturn]] void refuse_damaged(const std::string& record) const;

  std::unique_ptr<Content> content_;
};

}  // namespace penstock::internal
