// Reads and writes tensors in safetensors files, compatible with Python's `safetensors` package.
//
//   write_safetensors("model.safetensors", {{"weight", weight}, {"bias", bias}}, {{"step", "1000"}});
//   const SafetensorsFile file("model.safetensors");
//   at::Tensor weight = file.tensor("weight");
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/tensor/file_access.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

// Thrown when a file is not a safetensors file, when it cannot be read or written, and for a tensor that such a file
// cannot hold. The message names the file and the tensor, what was found and what was expected.
class SafetensorsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Writes `tensors`, which may have any strides and be on any device. Each is written with its own bytes, even where two
// share memory. The file has the order of the Python package's writer, not that of `tensors`.
//
// Writes a temporary file, syncs it and renames it to `path`, so a process that has the old file open keeps reading it,
// and if anything fails, the old file stays and no other is left behind. Replaces `path` itself if it is a symbolic
// link.
//
// Throws SafetensorsError: for a duplicate name, a dtype that safetensors do not support, a tensor that is sparse or
// has no memory, a full disk, …
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

class SafetensorsFile;

namespace internal {

// Gives the pages of a tensor of a file with FileAccess::MapReadOnly back to the system, which reads them again when
// they are touched. Does nothing for other tensors.
void release_pages(const at::Tensor& tensor);

}  // namespace internal

// A safetensors file that is open for reading. The constructor checks the whole header: sizes, offsets, overlaps and
// gaps. Data is read when it is first touched. Copies share the mapping. All functions are thread-safe.
class SafetensorsFile {
 public:
  // Throws SafetensorsError if `path` is not a regular file, cannot be read or is not a safetensors file.
  explicit SafetensorsFile(const std::string& path, FileAccess access = FileAccess::Map);

  // Returns the names in the order of their bytes in the file.
  const std::vector<std::string>& names() const;
  bool contains(std::string_view name) const;
  // Returns the header's __metadata__.
  const std::map<std::string, std::string>& metadata() const;

  // Returns the tensor with this name, on the CPU. It is a view of the mapping, keeps the mapping alive, and shares
  // memory with every other tensor returned for the name. Unless the mapping is read-only, it may be written in place:
  // pages are copied on write, and the file never changes.
  //
  // Two kinds of tensors are copied, as a view of their bytes would not be valid: those that another writer has placed
  // at an address that is not a multiple of the element size, and bool tensors with bytes other than 0 and 1, which
  // count as true.
  //
  // Throws SafetensorsError if there is no such tensor. A file that is mapped must not be truncated or overwritten in
  // place while a tensor of it exists; write_safetensors does neither.
  at::Tensor tensor(std::string_view name) const;

 private:
  friend void internal::release_pages(const at::Tensor& tensor);
  struct Content;
  using Context = std::shared_ptr<const Content>;
  Context content_;
};

// Returns all tensors of a file, as SafetensorsFile::tensor does, in the order of their bytes.
NamedTensors read_safetensors(const std::string& path, FileAccess access = FileAccess::Map);

}  // namespace penstock
