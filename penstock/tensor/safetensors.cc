#include "penstock/tensor/safetensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_map>

#include "penstock/base/text.h"
#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/safetensors/dtype.h"
#include "penstock/tensor/safetensors/header.h"
#include "penstock/tensor/tensor_text.h"

namespace penstock {

using internal::AtomicFileWriter;
using internal::concat;
using internal::fail_safetensors;
using internal::find_safetensors_dtype;
using internal::join;
using internal::lay_out_safetensors;
using internal::MappedFile;
using internal::MappingError;
using internal::parse_safetensors_header;
using internal::quoted_tensor;
using internal::SafetensorsEntry;
using internal::SafetensorsHeader;
using internal::to_bytes;

namespace {

std::unique_ptr<MappedFile> mapped(const std::string& path, FileAccess access) {
  try {
    return std::make_unique<MappedFile>(path, access);
  } catch (const MappingError& error) {
    throw SafetensorsError(error.what());
  }
}

// Requires that `path` names a regular file, or none yet.
void require_target(const std::string& path) {
  if (std::filesystem::path(path).filename().empty()) fail_safetensors(path, "could not be written: it names no file.");
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return;
  if (S_ISDIR(status.st_mode)) fail_safetensors(path, "is a directory; give the name of a file.");
  if (!S_ISREG(status.st_mode)) fail_safetensors(path, "is not a regular file, and is not replaced by one.");
}

// Requires a dense tensor whose storage has all bytes that its sizes and strides reach.
void require_bytes(const std::string& path, const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const auto&... problem) { fail_safetensors(path, quoted_tensor(name), problem...); };
  if (!tensor.defined()) refuse(" is undefined.");
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(" is not strided, as safetensors are.\n  Hint: to_dense() or to_padded_tensor() makes it so.");
  }
  if (tensor.is_meta() || !tensor.has_storage()) refuse(" has no memory: it is on ", tensor.device().str(), ".");
  const std::size_t reached = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                               static_cast<std::size_t>(tensor.storage_offset()));
  if (tensor.numel() > 0 && (tensor._is_zerotensor() || tensor.storage().nbytes() < reached)) {
    refuse(" has no memory: its storage has ", tensor.storage().nbytes(), " of ", reached, " bytes. Was it freed?");
  }
}

SafetensorsEntry entry_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name, .dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

// Returns the same values as a contiguous tensor on the CPU. Dtypes of one byte are viewed as bytes, as torch lacks
// kernels for some of them.
at::Tensor contiguous_on_cpu(const at::Tensor& tensor) {
  at::Tensor values = tensor.detach().resolve_conj().resolve_neg();
  if (values.element_size() == 1) values = values.view(at::kByte);
  return values.to(at::kCPU).contiguous();
}

}  // namespace

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : tensors) {
    require_bytes(path, name, tensor);
    entries.push_back(entry_of(name, tensor));
    by_name.emplace(name, &tensor);
  }
  const SafetensorsHeader header = lay_out_safetensors(std::move(entries), metadata, path);
  const std::string header_bytes = to_bytes(header, path);

  require_target(path);
  try {
    AtomicFileWriter file(path);
    file.write(header_bytes.data(), header_bytes.size());
    for (const SafetensorsEntry& entry : header.entries) {
      if (entry.begin == entry.end) continue;
      const at::Tensor values = contiguous_on_cpu(*by_name.at(entry.name));
      file.write(values.const_data_ptr(), entry.end - entry.begin);
    }
    file.commit();
  } catch (const AtomicFileWriter::Error& error) {
    throw SafetensorsError(error.what());
  }
}

struct SafetensorsFile::Content {
  Content(std::string source, FileAccess access)
      : path(std::move(source)),
        mapping(mapped(path, access)),
        header(parse_safetensors_header(mapping->bytes(), path)) {
    for (const SafetensorsEntry& entry : header.entries) {
      names.push_back(entry.name);
      by_name.emplace(entry.name, &entry);
    }
  }

  // Deleter of the tensors, whose context keeps the mapping alive.
  static void release(void* context) { delete static_cast<Context*>(context); }

  std::string path;
  std::unique_ptr<MappedFile> mapping;
  SafetensorsHeader header;
  std::vector<std::string> names;
  std::unordered_map<std::string_view, const SafetensorsEntry*> by_name;
};

SafetensorsFile::SafetensorsFile(const std::string& path, FileAccess access)
    : content_(std::make_shared<Content>(path, access)) {}

const std::vector<std::string>& SafetensorsFile::names() const {
  return content_->names;
}

bool SafetensorsFile::contains(std::string_view name) const {
  return content_->by_name.contains(name);
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return content_->header.metadata;
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const auto found = content_->by_name.find(name);
  if (found == content_->by_name.end()) {
    constexpr std::size_t kMaxNames = 3;
    std::vector<std::string> shown;
    for (std::size_t i = 0; i < std::min(names().size(), kMaxNames); ++i) shown.push_back(quoted_tensor(names()[i]));
    const std::string hint = shown.empty() ? "" : concat("\n  Hint: it has ", join(shown));
    fail_safetensors(content_->path, "there is no ", quoted_tensor(name), ".", hint,
                     names().size() > kMaxNames ? ", …" : "");
  }
  const SafetensorsEntry& entry = *found->second;
  const auto options = at::TensorOptions().dtype(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);

  char* const begin = content_->mapping->data() + content_->header.data_begin + entry.begin;
  const std::string_view bytes(begin, entry.end - entry.begin);
  if (reinterpret_cast<std::uintptr_t>(begin) % find_safetensors_dtype(entry.dtype)->element_bytes != 0) {
    at::Tensor copy = at::empty(entry.shape, options);
    std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
  if (entry.dtype == at::kBool && std::any_of(bytes.begin(), bytes.end(), [](char byte) { return (byte & ~1) != 0; })) {
    return at::from_blob(begin, entry.shape, at::kByte).to(at::kBool);
  }
  return at::for_blob(begin, entry.shape)
      .options(options)
      .context(new Context(content_), Content::release)
      .make_tensor();
}

void internal::release_pages(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != SafetensorsFile::Content::release) return;
  const auto& content = *static_cast<const SafetensorsFile::Context*>(data.get_context());
  content->mapping->release_pages({static_cast<const char*>(data.get()), tensor.storage().nbytes()});
}

NamedTensors read_safetensors(const std::string& path, FileAccess access) {
  const SafetensorsFile file(path, access);
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name));
  return tensors;
}

}  // namespace penstock
