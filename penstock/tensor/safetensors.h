// Tensors in safetensors files, as Python's `safetensors` package reads and writes them. A file is read by mapping it,
// and its tensors are views of the mapping; it is written beside its target, synced and renamed.
//
//   write_safetensors("model.safetensors", {{"weight", weight}, {"bias", bias}}, {{"step", "1000"}});
//   const SafetensorsFile file("model.safetensors");
//   at::Tensor weight = file.tensor("weight");
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/tensor/safetensors_header.h"

namespace penstock {

// Writes `tensors`, of any strides and on any device, each with its own bytes even where two share memory. The file has
// the order of the Python package's writer, not theirs. `path` is replaced when all is on the disk, so whoever has the
// old file open keeps it whole; if anything fails, the old file stays and nothing else is left. Where `path` is a link,
// the link is replaced.
// Throws SafetensorsError: a name twice, a dtype that safetensors do not have, a tensor that is sparse or without
// memory, a disk that is full, …
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// A file that is open for reading. All of its header is checked when it is opened (parse_safetensors_header says how);
// data is read when it is touched. Copies share the mapping, and any number of threads may use one.
class SafetensorsFile {
 public:
  // Throws SafetensorsError if `path` is no regular file, cannot be read or is not a safetensors file.
  explicit SafetensorsFile(const std::string& path, FileAccess access = FileAccess::Map);

  // In the order of their bytes.
  const std::vector<std::string>& names() const;
  bool contains(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;

  // The tensor of this name, on the CPU, without a copy: it shares the mapping with all others of the same name, and
  // keeps it alive. It may be written in place; the pages written become the process's own, and the file never changes.
  // Two kinds are copied, as a view of their bytes would not be safe to use: those that a foreign writer has put at an
  // address that is no multiple of their element's size, and bool tensors with bytes besides 0 and 1, which are taken
  // for 1.
  // Throws SafetensorsError if there is none. The file must not be cut short or overwritten in place while it is
  // mapped (FileAccess::Map); write_safetensors does neither.
  at::Tensor tensor(std::string_view name) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

// All tensors of a file, as SafetensorsFile gives them.
NamedTensors read_safetensors(const std::string& path, FileAccess access = FileAccess::Map);

}  // namespace penstock
