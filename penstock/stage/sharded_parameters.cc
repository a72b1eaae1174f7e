// Parameters of which each replica keeps a shard. They are gathered by an all-gather before the stage computes, and
// their gradients averaged by a reduce-scatter.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/stage/accumulation.h"
#include "penstock/stage/first_member_values.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

// Allocate and free the memory of a parameter without a change of its version, so that tensors that autograd has saved
// for a backward are valid again once the memory is filled.
void allocate(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage.nbytes() == tensor.nbytes()) return;
  const c10::DeviceGuard device(tensor.device());
  storage.set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(tensor.nbytes()));
  storage.set_nbytes(tensor.nbytes());
}
void free_memory(const at::Tensor& tensor) {
  use_on_stream(tensor);
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage.set_nbytes(0);
}

class ShardedParameters final : public ParameterSync {
 public:
  ShardedParameters(const StageModule& module, const std::vector<bool>& shared, int stage, std::shared_ptr<Group> group,
                    Deadline deadline)
      : stage_(stage), group_(std::move(group)), initial_(module, *group_, deadline) {
    const c10::AutoGradMode no_grad(false);
    // Index of each tensor in whole_. A module may have one tensor under several names.
    std::map<const void*, std::size_t> index_of;
    // Index in whole_ of each parameter of the module; none for one that stays whole.
    std::vector<std::optional<std::size_t>> indices;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < module.parameters.size(); ++i) {
      const auto& [name, parameter] = module.parameters[i];
      if (shared[i]) {
        indices.emplace_back();
        continue;
      }
      const auto [found, is_new] = index_of.try_emplace(parameter.unsafeGetTensorImpl(), whole_.size());
      indices.emplace_back(found->second);
      if (!is_new) continue;
      names.push_back(parameter_name(stage, name));
      whole_.push_back(parameter);
      lengths_.push_back((parameter.numel() + group_->size() - 1) / group_->size());
      length_ += lengths_.back();
    }
    if (!whole_.empty()) part_ = at::zeros({length_}, whole_.front().options().requires_grad(false));
    std::vector<AccumulatedGradients::Parameter> accumulated;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      shards_.push_back(part_.narrow(0, first, lengths_[i]).detach().requires_grad_(whole_[i].requires_grad()));
      accumulated.push_back({names[i], shards_[i], whole_[i]});
      first += lengths_[i];
    }
    for (std::size_t i = 0; i < module.parameters.size(); ++i) {
      const auto& [name, parameter] = module.parameters[i];
      visible_.emplace_back(name, indices[i] ? shards_[*indices[i]] : parameter);
    }
    gradients_.emplace(accumulated,
                       [this](std::size_t i, const at::Tensor& gradient) { return own_shard(i, gradient); });
  }

  const NamedTensors& parameters() const override { return visible_; }

  void adopt() override {
    initial_.adopt();
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      shards_[i].detach().copy_(own_shard(i, whole_[i].detach()));
      free_memory(whole_[i]);
    }
  }

  void begin_step() override { gradients_->begin_step(); }
  void end_step() override { gradients_->end_step(); }

  void unshard() override {
    if (gathered_ || gathering_ || whole_.empty()) return;
    buffer_ = at::empty({length_ * group_->size()}, part_.options());
    gathering_ = group_->all_gather(buffer_, part_);
  }

  void finish_unshard(Deadline deadline) override {
    if (gathered_ || whole_.empty()) return;
    if (!gathering_) {
      throw StageError(
          concat("stage ", stage_, " computes without its parameters: they are sharded, and no UNSHARD came before."));
    }
    std::exchange(gathering_, nullptr)->wait(deadline);
    for (const at::Tensor& parameter : whole_) allocate(parameter);
    // Below autograd, a copy does not raise the version.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for_each_shard([&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t in_buffer) {
      if (whole_[i].is_cpu()) {
        // A call of operators for each shard would take longer than the copy of a small one.
        const std::size_t size = whole_[i].element_size();
        std::memcpy(static_cast<char*>(whole_[i].data_ptr()) + static_cast<std::size_t>(begin) * size,
                    static_cast<const char*>(buffer_.const_data_ptr()) + static_cast<std::size_t>(in_buffer) * size,
                    static_cast<std::size_t>(count) * size);
      } else {
        whole_[i].view(-1).narrow(0, begin, count).copy_(buffer_.narrow(0, in_buffer, count));
      }
    });
    buffer_.reset();
    gathered_ = true;
  }

  void reshard() override {
    for (const at::Tensor& parameter : whole_) free_memory(parameter);
    gathered_ = false;
  }

  void reduce() override {
    if (whole_.empty()) return;
    const c10::AutoGradMode no_grad(false);
    all_gradients_ = at::zeros({length_ * group_->size()}, part_.options());
    for (const at::Tensor& parameter : whole_) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined()) gradient = dense(gradient);
    }
    for_each_shard([&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t in_buffer) {
      const at::Tensor& gradient = whole_[i].grad();
      if (gradient.defined()) {
        all_gradients_.narrow(0, in_buffer, count).copy_(gradient.view(-1).narrow(0, begin, count));
      }
    });
    present_ = at::zeros({static_cast<std::int64_t>(whole_.size())});
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      at::Tensor& gradient = whole_[i].mutable_grad();
      if (gradient.defined()) present_.data_ptr<float>()[i] = 1;
      gradient.reset();
    }
    gradient_part_ = at::empty({length_}, part_.options());
    reducing_.push_back(group_->reduce_scatter(gradient_part_, all_gradients_));
    reducing_.push_back(group_->all_reduce({present_}));
  }

  void finish_reduce(Deadline deadline) override {
    if (reducing_.empty()) return;
    for (const auto& work : std::exchange(reducing_, {})) work->wait(deadline);
    const c10::AutoGradMode no_grad(false);
    gradient_part_.div_(group_->size());
    std::vector<at::Tensor> reduced(shards_.size());
    std::int64_t first = 0;
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      if (present_.data_ptr<float>()[i] > 0) reduced[i] = gradient_part_.narrow(0, first, lengths_[i]).clone();
      first += lengths_[i];
    }
    gradients_->end_reduction(reduced);
    all_gradients_.reset();
    gradient_part_.reset();
  }

  void rollback() override {
    gathering_.reset();
    reducing_.clear();
    buffer_.reset();
    all_gradients_.reset();
    gradient_part_.reset();
    reshard();
    gradients_->rollback();
  }
  void join(std::shared_ptr<Group> group) override { group_ = std::move(group); }

 private:
  // Calls visit(parameter, first element, number of elements, offset in the gathered buffer) for each member's shards.
  template <class Visit>
  void for_each_shard(const Visit& visit) {
    for (std::int64_t member = 0; member < group_->size(); ++member) {
      std::int64_t in_buffer = member * length_;
      for (std::size_t i = 0; i < whole_.size(); ++i) {
        const std::int64_t begin = std::min(member * lengths_[i], whole_[i].numel());
        const std::int64_t count = std::min(lengths_[i], whole_[i].numel() - begin);
        if (count > 0) visit(i, begin, count, in_buffer);
        in_buffer += lengths_[i];
      }
    }
  }

  // Returns this member's shard of a whole tensor, padded with zeros to the length of a shard.
  at::Tensor own_shard(std::size_t i, const at::Tensor& whole) const {
    const std::int64_t begin = std::min(group_->member() * lengths_[i], whole.numel());
    const std::int64_t count = std::min(lengths_[i], whole.numel() - begin);
    const at::Tensor piece = dense(whole).view(-1).narrow(0, begin, count);
    return count == lengths_[i] ? piece : at::cat({piece, at::zeros({lengths_[i] - count}, piece.options())});
  }

  int stage_;
  std::shared_ptr<Group> group_;
  FirstMemberValues initial_;
  // The module's parameters, and the length of a shard of each; the last shard may be padded.
  std::vector<at::Tensor> whole_;
  std::vector<std::int64_t> lengths_;
  std::int64_t length_ = 0;
  // All shards of this member in one buffer, and each as a parameter. visible_ also has the parameters that stay whole.
  at::Tensor part_;
  std::vector<at::Tensor> shards_;
  NamedTensors visible_;
  bool gathered_ = false;
  std::unique_ptr<Work> gathering_;
  at::Tensor buffer_;
  std::vector<std::unique_ptr<Work>> reducing_;
  std::optional<AccumulatedGradients> gradients_;
  // Number of members that have a gradient, by parameter.
  at::Tensor present_;
  at::Tensor all_gradients_;
  at::Tensor gradient_part_;
};

}  // namespace

std::string parameter_name(int stage, const std::string& name) {
  return concat("stage ", stage, ", parameter '", name, "'");
}

void require_shardable(const std::vector<StageToShard>& stages) {
  // The parameter that has a storage. `module` is one of `stages`; `tensor` is an identity that is not dereferenced.
  struct Owner {
    const StageModule* module;
    const void* tensor;
    std::string name;
  };
  std::map<const void*, Owner> owners;
  for (const auto& [module, shared, stage] : stages) {
    std::optional<at::ScalarType> dtype;
    for (std::size_t i = 0; i < module->parameters.size(); ++i) {
      if (shared[i]) continue;
      const at::Tensor& parameter = module->parameters[i].second;
      const std::string name = parameter_name(stage, module->parameters[i].first);
      if (!dtype) dtype = parameter.scalar_type();
      if (parameter.scalar_type() != *dtype) {
        throw StageError(
            concat(name, ": found ", dtype_name(parameter.scalar_type()), ", expected ", dtype_name(*dtype),
                   ", the dtype of the first parameter: the sharded parameters of a stage have one dtype."));
      }
      if (!parameter.is_contiguous() || parameter.storage().nbytes() != parameter.nbytes()) {
        throw StageError(concat(name, " is a view or not contiguous; a sharded parameter has a storage of its own.\n",
                                "  Hint: make it a contiguous tensor of its own, for example with clone()."));
      }
      const auto [owner, is_new] = owners.try_emplace(parameter.storage().unsafeGetStorageImpl(),
                                                      Owner{module, parameter.unsafeGetTensorImpl(), name});
      // One tensor under several names of a stage is one parameter.
      if (is_new || (owner->second.module == module && owner->second.tensor == parameter.unsafeGetTensorImpl()))
        continue;
      throw StageError(concat(name, " shares its storage with ", owner->second.name,
                              "; a sharded parameter has a storage of its own.\n"
                              "  Hint: give each replica and each parameter a tensor of its own."));
    }
  }
  // Returns the sharded parameter in whose memory the tensor is, or null.
  const auto owner_of = [&](const at::Tensor& tensor) -> const Owner* {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    const auto owner = owners.find(tensor.storage().unsafeGetStorageImpl());
    return owner == owners.end() ? nullptr : &owner->second;
  };
  const auto require_apart = [&](const at::Tensor& tensor, const std::string& name) {
    const Owner* const owner = owner_of(tensor);
    if (owner == nullptr) return;
    throw StageError(concat(name, " shares its storage with ", owner->name,
                            ", which is sharded; a sharded parameter has a storage of its own.\n"
                            "  Hint: give each of them a tensor of its own."));
  };
  for (const auto& [module, shared, stage] : stages) {
    for (std::size_t i = 0; i < module->parameters.size(); ++i) {
      const auto& [name, parameter] = module->parameters[i];
      if (shared[i]) require_apart(parameter, parameter_name(stage, name));
    }
    for (const auto& [name, buffer] : module->buffers) {
      require_apart(buffer, concat("stage ", stage, ", buffer '", name, "'"));
    }
    for (const auto& [name, tensor] : module->state) {
      if (owner_of(tensor) == nullptr) continue;
      throw StageError(concat(owner_of(tensor)->name,
                              " is written to by the stage's forward, and cannot be sharded: each replica would lose "
                              "what it has written.\n  Hint: make it a buffer."));
    }
  }
}

std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline) {
  return std::make_unique<ShardedParameters>(module, shared, stage, std::move(group), deadline);
}

}  // namespace penstock::internal
