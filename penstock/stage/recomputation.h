// A part of a forward that saves its inputs only, and is computed again when the backward needs what it would have
// saved. checkpoint.h is the interface for users.
//
//   RecomputedPartScope scope({x});
//   at::Tensor y = block(x);
//   scope.close([block](const std::vector<at::Tensor>& inputs) { block(inputs[0]); });
//
// The graph of autograd is that of a forward without it: only the tensors that its nodes saved are missing, and each is
// taken from a second run of the part. So the backward, whole or in halves, gives the same bits, and hooks see the
// same.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/stage/module.h"
#include "penstock/stage/saved_tensor_hooks.h"
#include "penstock/stage/stage_history.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/random_scope.h"

namespace penstock::internal {

// Computes the part from its inputs. Its results are ignored.
using RecomputedFunction = std::function<void(const std::vector<at::Tensor>& inputs)>;

struct RecomputedPartOptions {
  // True if the part may write to buffers of its stage. They are then those of the forward when it is computed again.
  bool writes_buffers = true;
  // True if the function may write into the tensors that it gets, which are then aliases.
  bool writes_arguments = false;
};

// State of a device's default generator.
struct DefaultRandom {
  at::Device device;
  at::Tensor state;
};

// Numbers of parts that were made, and that were computed again, by all threads of the process. Parts that saved
// nothing do not count. For tests.
struct RecomputationCounts {
  std::int64_t made = 0;
  std::int64_t recomputed = 0;
};
RecomputationCounts recomputation_counts();

// Shared by the nodes that saved tensors in the part. One thread at a time uses it: that of the stage's rank, or of the
// backward that it waits for.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  Recomputation(const std::vector<at::Tensor>& inputs, std::shared_ptr<StageHistory> history,
                const RecomputedPartOptions& options);
  ~Recomputation() = default;
  Recomputation(const Recomputation&) = delete;
  Recomputation& operator=(const Recomputation&) = delete;

  // Computes the part again, unless that has been done. The graph calls it when it needs a tensor. Throws StageError if
  // the part saves tensors of another number, shape or dtype than in the forward, or a parameter was modified
  // meanwhile. After a failure it can be called again.
  void run();
  // Releases the function and the inputs: the step is over, and nothing may be computed again.
  void expire();

 private:
  friend class RecomputedPartScope;
  class DroppingHooks;
  class CapturingHooks;

  enum class State {
    // The forward of the part has not ended.
    Forward,
    // It has failed.
    Failed,
    // The part can be computed again.
    Ready,
    Computing,
    Done,
    // The step is over, and the part was not computed again.
    Expired,
  };
  // A tensor that a node saved in the forward.
  struct Saved {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype = at::ScalarType::Undefined;
    // Version of a parameter, or of what it is a view of, which has to be the same when it is computed again; none for
    // other tensors.
    std::optional<std::uint32_t> parameter_version;
    // The tensor, once it has been computed again, and its version then.
    at::Tensor tensor;
    std::uint32_t version = 0;
    // True when the node has released it.
    bool is_released = false;
  };
  // Thread-local and process-wide state that is that of the forward while the part is computed again.
  class ForwardState;

  bool restores_buffers() const { return history_ != nullptr && options_.writes_buffers; }
  void require_unwritten_inputs(const char* when) const;
  void compute();
  void release();
  const at::Tensor& saved_tensor(std::size_t index);

  State state_ = State::Forward;
  RecomputedPartOptions options_;
  std::vector<Saved> saved_;
  // Inputs without their history, until the part is computed again.
  std::vector<at::Tensor> inputs_;
  std::vector<bool> needs_grad_;
  std::vector<std::uint32_t> versions_;
  RecomputedFunction function_;
  std::optional<RandomScope::Position> random_;
  // States of the default generators, if the forward was in no random scope.
  std::vector<DefaultRandom> default_random_;
  // Autocast in the forward.
  AutocastState autocast_;
  // History of the stage, and the moment before the part; null outside of a stage.
  std::shared_ptr<StageHistory> history_;
  StageHistory::Moment before_;
};

// The forward of a part: what operators of this thread save is dropped while it lives.
class RecomputedPartScope {
 public:
  // `inputs` are the tensors from which the part is computed, besides those that the function keeps itself, such as
  // parameters. They are not copied, so the part must not write into them.
  explicit RecomputedPartScope(const std::vector<at::Tensor>& inputs, const RecomputedPartOptions& options = {});
  ~RecomputedPartScope();
  RecomputedPartScope(const RecomputedPartScope&) = delete;
  RecomputedPartScope& operator=(const RecomputedPartScope&) = delete;

  // Ends the part, which is computed again by `function`. Throws StageError if an input was written to. Without a call,
  // because the part has thrown, its graph cannot be used.
  std::shared_ptr<Recomputation> close(RecomputedFunction function);

  // True if a part that begins here would save less: autograd is on, and this is not within another part, of which
  // nothing is saved, or which is being computed again as a whole.
  static bool is_useful();
  // True within a part, in its forward and when it is computed again.
  static bool is_open();

 private:
  std::shared_ptr<Recomputation> recomputation_;
  std::optional<SavedTensorHooksScope> hooks_;
};

// While it lives, parts of the forward on this thread belong to the stage with this history.
class StageHistoryScope {
 public:
  explicit StageHistoryScope(std::shared_ptr<StageHistory> history);
  ~StageHistoryScope();
  StageHistoryScope(const StageHistoryScope&) = delete;
  StageHistoryScope& operator=(const StageHistoryScope&) = delete;

 private:
  std::shared_ptr<StageHistory> outer_;
};

// Forward of a whole stage that is a part.
struct RecomputedForward {
  c10::IValue output;
  std::shared_ptr<Recomputation> recomputation;
};

// Returns the arguments of the module, made of tensors that the stage received and of the caller's arguments.
using MakeArguments = std::function<Args(const std::vector<at::Tensor>& received, const Args& args)>;

// Calls the module with `arguments`, which it may write into, except for tensors of the caller. It is called again with
// what `make_arguments` returns for aliases of `received` and of the tensors in `args` and `kwargs`. The module and
// what `make_arguments` refers to have to live until the recomputation is done or has expired.
RecomputedForward forward_for_recomputation(const StageModule& module, const Args& arguments,
                                            const std::vector<at::Tensor>& received, const Args& args,
                                            const Kwargs& kwargs, MakeArguments make_arguments);

}  // namespace penstock::internal
