// Remembers what the forwards of a stage read besides their arguments, at some moments, so that a part of a forward can
// be computed again as it was: the values of tensors that forwards write to, and the versions of parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "penstock/stage/module.h"

namespace penstock::internal {

// Moments between which a tensor did not change share one copy of it. Nothing tells reliably that a tensor was written
// to (kernels of batch normalisation do not raise its version), so each moment reads all of them. On a device each
// moment copies them.
class StageHistory {
 public:
  struct Moment {
    // A copy of each tensor that forwards write to. Never written to.
    std::vector<at::Tensor> values;
    std::vector<std::uint32_t> versions;
  };

  // Follows the tensors that the forward of a module may write to, and the versions of its other parameters.
  explicit StageHistory(const StageModule& module);

  // Returns the present. Without values, the moment cannot be restored.
  Moment now(bool with_values = true);
  // Writes the values of a moment into the tensors: on the CPU into those that differ, on a device into all, as a
  // comparison would wait for it. They get no new version, so what autograd has saved stays valid.
  void restore(const Moment& moment);
  // Throws StageError if a parameter was modified since a moment.
  void require_same_parameters(const Moment& moment) const;
  // True if the tensor lies in memory that restore() writes to.
  bool writes_to(const at::Tensor& tensor) const;
  // Releases the copies that no moment needs.
  void forget() { last_.assign(written_.size(), {}); }

 private:
  std::vector<at::Tensor> written_;
  std::unordered_set<const void*> storages_;
  NamedTensors parameters_;
  std::vector<at::Tensor> last_;
};

// Gives the tensors that forwards write to the values of a moment while it lives.
class MomentScope {
 public:
  MomentScope(StageHistory& history, const StageHistory::Moment& moment) : MomentScope(history) {
    history.restore(moment);
  }
  // A failure of the restoration becomes a warning.
  ~MomentScope();
  MomentScope(const MomentScope&) = delete;
  MomentScope& operator=(const MomentScope&) = delete;

 private:
  explicit MomentScope(StageHistory& history) : history_(history), before_(history.now()) {}

  StageHistory& history_;
  StageHistory::Moment before_;
};

}  // namespace penstock::internal
