// Reads the weights of an export.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/program/reader/archive.h"

namespace penstock::internal {

// Parameters, buffers and constants by name. Names that are tied in the model share one tensor.
//
// A tensor lies in the mapped file until it is loaded: then its storage gets memory of its own with the same bytes, and
// what happens to the file no longer matters. So a process that loads the weights of its own stages has no memory for
// the others. Sizes and dtypes may be read before. All members may be called from any thread.
class Weights {
 public:
  // Reads the indices of the archive. Of an archive in memory everything is loaded at once. Throws ProgramError.
  explicit Weights(std::shared_ptr<const Archive> archive);
  ~Weights() = default;
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const std::map<std::string, at::Tensor>& by_name() const { return by_name_; }

  // Load what has not been loaded. Throw ProgramError for a record whose checksum is wrong.
  void load(const at::Tensor& tensor);
  void load_all();
  bool is_loaded(const at::Tensor& tensor) const;

  // Returns a tensor with storage of its own and the same values: not loaded if the original is not.
  at::Tensor copy_of(const at::Tensor& tensor);
  // Gives the tensor other values: at once if it has been loaded, else when it is loaded. The caller keeps `values` as
  // they are until then. Both have the same sizes and dtype.
  void replace(const at::Tensor& tensor, const at::Tensor& values);

  // Returns the records of the archive with the current values, as byte tensors. Loads everything.
  std::map<std::string, at::Tensor> records();

 private:
  // A storage that lies in the mapped file.
  struct Unloaded {
    // Keeps the storage alive, so that no other one has its address.
    at::Tensor bytes;
    std::string record;
    // Tensors of the storage, and their values in place of those of the file.
    std::vector<std::pair<at::Tensor, at::Tensor>> replaced;
  };

  void read_index(const std::string& folder, const std::string& index);
  // Returns the bytes of a record, in the mapped file if they are aligned there.
  at::Tensor record_bytes(const std::string& record);
  void load_storage(const void* storage) PENSTOCK_REQUIRES(mutex_);

  std::shared_ptr<const Archive> archive_;
  std::map<std::string, at::Tensor> by_name_;
  // Byte tensors with the storages of records that have been read from the index.
  std::map<std::string, at::Tensor> records_;
  mutable Mutex mutex_;
  std::unordered_map<const void*, Unloaded> unloaded_ PENSTOCK_GUARDED_BY(mutex_);
  std::atomic<bool> has_unloaded_ = true;
};

}  // namespace penstock::internal
