#include "penstock/tensor/safetensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_map>

#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/tensor/mapped_file.h"

namespace penstock {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw SafetensorsError(path + ": " + what);
}

std::unique_ptr<MappedFile> mapped(const std::string& path, FileAccess access) {
  try {
    return std::make_unique<MappedFile>(path, access);
  } catch (const MappingError& failure) {
    throw SafetensorsError(failure.what());
  }
}

void require_target(const std::string& path) {
  if (std::filesystem::path(path).filename().empty()) fail(path, "could not be written: it names no file.");
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return;
  if (S_ISDIR(status.st_mode)) fail(path, "is a directory; give the name of a file.");
  if (!S_ISREG(status.st_mode)) fail(path, "is not a regular file, and is not replaced by one.");
}

// Refuses what has no bytes to write, or fewer than its sizes and strides reach.
void require_bytes(const std::string& path, const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& why) { fail(path, tensor_text(name) + why); };
  if (!tensor.defined()) refuse(" is undefined.");
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(" is not strided, as safetensors are.\n  Hint: to_dense() or to_padded_tensor() makes it so.");
  }
  if (tensor.is_meta() || !tensor.has_storage()) refuse(" has no memory: it is on " + tensor.device().str() + ".");
  const std::size_t reached = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                               static_cast<std::size_t>(tensor.storage_offset()));
  if (tensor.numel() > 0 && (tensor._is_zerotensor() || tensor.storage().nbytes() < reached)) {
    refuse(" has no memory: its storage has " + std::to_string(tensor.storage().nbytes()) + " of " +
           std::to_string(reached) + " bytes. Was it freed?");
  }
}

SafetensorsEntry entry_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name, .dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

// The same values, one after another in the CPU's memory. Narrow dtypes, for which torch lacks kernels, go as bytes.
at::Tensor plain(const at::Tensor& tensor) {
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
  const std::string beginning = to_bytes(header, path);

  require_target(path);
  try {
    AtomicFileWriter file(path);
    file.write(beginning.data(), beginning.size());
    for (const SafetensorsEntry& entry : header.entries) {
      if (entry.begin == entry.end) continue;
      const at::Tensor values = plain(*by_name.at(entry.name));
      file.write(values.const_data_ptr(), entry.end - entry.begin);
    }
    file.commit();
  } catch (const AtomicFileWriter::Error& failure) {
    throw SafetensorsError(failure.what());
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
    std::string hint;
    for (std::size_t i = 0; i < std::min<std::size_t>(names().size(), 3); ++i) {
      hint += (i == 0 ? "\n  Hint: it has " : ", ") + tensor_text(names()[i]);
    }
    fail(content_->path, "there is no " + tensor_text(name) + "." + hint + (names().size() > 3 ? ", …" : ""));
  }
  const SafetensorsEntry& entry = *found->second;
  const auto options = at::TensorOptions().dtype(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);

  char* const begin = content_->mapping->data() + content_->header.data_begin + entry.begin;
  const std::string_view bytes(begin, entry.end - entry.begin);
  if (reinterpret_cast<std::uintptr_t>(begin) % safetensors_element_size(entry.dtype) != 0) {
    at::Tensor copy = at::empty(entry.shape, options);
    std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
  if (entry.dtype == at::kBool && std::any_of(bytes.begin(), bytes.end(), [](char byte) { return (byte & ~1) != 0; })) {
    return at::from_blob(begin, entry.shape, at::kByte).to(at::kBool);
  }
  return at::from_blob(begin, entry.shape, [content = content_](void* /*data*/) {}, options);
}

NamedTensors read_safetensors(const std::string& path, FileAccess access) {
  const SafetensorsFile file(path, access);
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name));
  return tensors;
}

}  // namespace penstock
