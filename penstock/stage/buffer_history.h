// Values that the buffers of a stage had at some moments, so that a part of its forward can be computed again as it was.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/stage/module.h"

namespace penstock::internal {

// Moments between which a buffer did not change share one copy of it. Reads all buffers at each moment.
class BufferHistory {
 public:
  // A copy of each buffer. Never written to.
  using Moment = std::vector<at::Tensor>;

  // Follows the buffers and the state of a module.
  explicit BufferHistory(const StageModule& module);

  // Returns the values of the buffers.
  Moment now();
  // Writes the values of a moment into the buffers. Only buffers that differ are written, without a new version: tensors
  // that autograd has saved stay valid.
  void restore(const Moment& moment);
  // Releases the copies that no moment needs.
  void forget() { last_.assign(buffers_.size(), {}); }

 private:
  std::vector<at::Tensor> buffers_;
  Moment last_;
};

// Gives the buffers the values of a moment while it lives.
class MomentScope {
 public:
  MomentScope(BufferHistory& history, const BufferHistory::Moment& moment) : MomentScope(history) {
    history.restore(moment);
  }
  // A failure of the restoration becomes a warning.
  ~MomentScope();
  MomentScope(const MomentScope&) = delete;
  MomentScope& operator=(const MomentScope&) = delete;

 private:
  explicit MomentScope(BufferHistory& history) : history_(history), before_(history.now()) {}

  BufferHistory& history_;
  BufferHistory::Moment before_;
};

}  // namespace penstock::internal
