// Reads the weights of an export.
#pragma once

#include <ATen/TensorGeometry.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/program/initial_values.h"
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
  // Makes a name stand for the tensor of another one. Call it before anything is loaded or copied.
  void tie(const std::string& name, const std::string& other) { by_name_[name] = by_name_.at(other); }

  // True if the model was exported on the meta device: its tensors have no values in the file.
  bool lacks_values() const { return lacks_values_; }
  // Sets the values of such tensors when they are loaded, unless others were given by replace(). `values` is called
  // under a lock, and must not use the weights.
  void initialise(InitialValues values);

  // Load what has not been loaded. Throw ProgramError for a record whose checksum is wrong, and for a tensor that has
  // neither a record nor initial values.
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
  // A tensor without values.
  struct Uninitialised {
    std::string name;
    at::TensorGeometry geometry;
    at::ScalarType dtype = at::ScalarType::Float;
    bool requires_grad = false;
  };
  // A storage that lies in the mapped file, or that has no memory yet.
  struct Unloaded {
    // Keeps the storage alive, so that no other one has its address.
    at::Tensor bytes;
    // Record with the bytes; none for a tensor without values.
    std::string record = {};
    std::optional<Uninitialised> uninitialised = std::nullopt;
    // Tensors of the storage, and their values in place of those of the file.
    std::vector<std::pair<at::Tensor, at::Tensor>> replaced = {};
  };

  void read_index(const std::string& folder, const std::string& index);
  // Returns the bytes of a record, in the mapped file if they are aligned there.
  at::Tensor record_bytes(const std::string& record);
  // Returns a storage of this size without memory, as bytes.
  static at::Tensor without_memory(std::int64_t size);
  void load_storage(const void* storage) PENSTOCK_REQUIRES(mutex_);
  // Returns the bytes of a storage in memory of its own.
  at::Tensor loaded_bytes(const Unloaded& unloaded) const PENSTOCK_REQUIRES(mutex_);

  std::shared_ptr<const Archive> archive_;
  std::map<std::string, at::Tensor> by_name_;
  // Byte tensors with the storages of records that have been read from the index.
  std::map<std::string, at::Tensor> records_;
  mutable Mutex mutex_;
  std::unordered_map<const void*, Unloaded> unloaded_ PENSTOCK_GUARDED_BY(mutex_);
  std::atomic<bool> has_unloaded_ = true;
  bool lacks_values_ = false;
  InitialValues initial_values_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::internal
