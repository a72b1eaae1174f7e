#include "penstock/stage/parameters.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>

#include "penstock/stage/wiring.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

// Enough for a collective to be worth its start, and few enough that the first is under way before the last is ready.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;

std::string parameter_name(int stage, const std::string& name) {
  return "stage " + std::to_string(stage) + ", parameter '" + name + "'";
}

// Parameters and buffers of a group's first member.
class OfFirstMember {
 public:
  OfFirstMember(const StageModule& module, Group& group, Deadline deadline) {
    const c10::AutoGradMode no_grad(false);
    std::unordered_set<const void*> seen;
    for (const auto* named : {&module.parameters, &module.buffers}) {
      for (const auto& [name, tensor] : *named) {
        if (seen.insert(tensor.unsafeGetTensorImpl()).second) own_.push_back(tensor.detach());
      }
    }
    for (const at::Tensor& tensor : own_) values_.push_back(group.member() == 0 ? tensor : at::empty_like(tensor));
    group.broadcast(values_, 0)->wait(deadline);
    // All or none: nobody adopts what others have not got.
    group.barrier()->wait(deadline);
  }

  void adopt() {
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (!values_[i].is_same(own_[i])) own_[i].copy_(values_[i]);
    }
    own_.clear();
    values_.clear();
  }

 private:
  std::vector<at::Tensor> own_;
  std::vector<at::Tensor> values_;
};

std::vector<AccumulatedGradients::Parameter> not_shared(const StageModule& module, const std::vector<bool>& shared,
                                                        int stage) {
  std::vector<AccumulatedGradients::Parameter> own;
  for (std::size_t i = 0; i < module.parameters.size(); ++i) {
    const auto& [name, parameter] = module.parameters[i];
    if (!shared[i]) own.push_back({parameter_name(stage, name), parameter, parameter});
  }
  return own;
}

class ReplicatedParameters : public ParameterSync {
 public:
  ReplicatedParameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                       std::shared_ptr<Group> group, Deadline deadline)
      : all_(module.parameters),
        group_(std::move(group)),
        of_first_(module, *group_, deadline),
        gradients_(not_shared(module, shared, stage)) {}

  const NamedTensors& parameters() const override { return all_; }
  void adopt() override { of_first_.adopt(); }

  void begin_step() override { gradients_.begin_step(); }
  void end_step() override { gradients_.end_step(); }

  void reduce() override {
    const c10::AutoGradMode no_grad(false);
    present_ = at::zeros({static_cast<std::int64_t>(gradients_.size())});
    sums_.assign(gradients_.size(), {});
    std::vector<at::Tensor> bucket{present_};
    std::size_t bytes = 0;
    for (std::size_t i = gradients_.size(); i-- > 0;) {
      sums_[i] = gradients_.to_reduce(i);
      if (sums_[i].defined()) present_.data_ptr<float>()[i] = 1;
      if (!sums_[i].defined()) sums_[i] = at::zeros_like(gradients_.computed(i));
      bucket.push_back(sums_[i]);
      bytes += sums_[i].nbytes();
      if (bytes < kBucketBytes) continue;
      works_.push_back(group_->all_reduce(std::exchange(bucket, {})));
      bytes = 0;
    }
    if (!bucket.empty()) works_.push_back(group_->all_reduce(std::move(bucket)));
  }

  void finish_reduce(Deadline deadline) override {
    if (works_.empty()) return;
    for (const auto& work : std::exchange(works_, {})) work->wait(deadline);
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      // Where nobody has a gradient there is none, as in one process.
      if (present_.data_ptr<float>()[i] > 0) {
        sums_[i].div_(group_->size());
      } else {
        sums_[i].reset();
      }
    }
    gradients_.end_reduction(std::exchange(sums_, {}));
  }

  void unshard() override {}
  void finish_unshard(Deadline /*deadline*/) override {}
  void reshard() override {}

  void rollback() override {
    works_.clear();
    sums_.clear();
    gradients_.rollback();
  }
  void join(std::shared_ptr<Group> group) override { group_ = std::move(group); }

 private:
  NamedTensors all_;
  std::shared_ptr<Group> group_;
  OfFirstMember of_first_;
  AccumulatedGradients gradients_;
  // By parameter: the gradients that are summed, and how many members have one.
  std::vector<at::Tensor> sums_;
  at::Tensor present_;
  std::vector<std::unique_ptr<Work>> works_;
};

// The memory of a parameter, without autograd's knowing of it: what was saved for a backward finds it again.
void resize_storage(const at::Tensor& tensor, std::size_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

class ShardedParameters : public ParameterSync {
 public:
  ShardedParameters(const StageModule& module, const std::vector<bool>& shared, int stage, std::shared_ptr<Group> group,
                    Deadline deadline)
      : stage_(stage), group_(std::move(group)), of_first_(module, *group_, deadline) {
    const c10::AutoGradMode no_grad(false);
    // The number of each tensor: a module may have one under several names.
    std::map<const void*, std::size_t> number_of;
    std::vector<std::optional<std::size_t>> numbers;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < module.parameters.size(); ++i) {
      const auto& [name, parameter] = module.parameters[i];
      if (shared[i]) {
        numbers.emplace_back();
        continue;
      }
      const auto [found, is_new] = number_of.try_emplace(parameter.unsafeGetTensorImpl(), whole_.size());
      numbers.emplace_back(found->second);
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
      seen_.emplace_back(name, numbers[i] ? shards_[*numbers[i]] : parameter);
    }
    gradients_.emplace(accumulated,
                       [this](std::size_t i, const at::Tensor& gradient) { return own_piece(i, gradient); });
  }

  const NamedTensors& parameters() const override { return seen_; }

  void adopt() override {
    of_first_.adopt();
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      shards_[i].detach().copy_(own_piece(i, whole_[i].detach()));
      resize_storage(whole_[i], 0);
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
      throw StageError("stage " + std::to_string(stage_) +
                       " computes without its parameters: they are sharded, and no "
                       "UNSHARD came before.");
    }
    std::exchange(gathering_, nullptr)->wait(deadline);
    for (const at::Tensor& parameter : whole_) resize_storage(parameter, parameter.nbytes());
    for_each_piece([&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t in_buffer) {
      const std::size_t size = whole_[i].element_size();
      std::memcpy(static_cast<char*>(whole_[i].data_ptr()) + static_cast<std::size_t>(begin) * size,
                  static_cast<const char*>(buffer_.const_data_ptr()) + static_cast<std::size_t>(in_buffer) * size,
                  static_cast<std::size_t>(count) * size);
    });
    buffer_.reset();
    gathered_ = true;
  }

  void reshard() override {
    for (const at::Tensor& parameter : whole_) resize_storage(parameter, 0);
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
    for_each_piece([&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t in_buffer) {
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
  // Calls visit(parameter, its first element, how many, where they are among all parts) for each member's piece.
  template <class Visit>
  void for_each_piece(const Visit& visit) {
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

  // Returns this member's piece of a whole tensor, as long as its shard.
  at::Tensor own_piece(std::size_t i, const at::Tensor& whole) const {
    const std::int64_t begin = std::min(group_->member() * lengths_[i], whole.numel());
    const std::int64_t count = std::min(lengths_[i], whole.numel() - begin);
    const at::Tensor piece = dense(whole).view(-1).narrow(0, begin, count);
    return count == lengths_[i] ? piece : at::cat({piece, at::zeros({lengths_[i] - count}, piece.options())});
  }

  int stage_;
  std::shared_ptr<Group> group_;
  OfFirstMember of_first_;
  // The module's own, and how long a shard of each is; the last may be padded.
  std::vector<at::Tensor> whole_;
  std::vector<std::int64_t> lengths_;
  std::int64_t length_ = 0;
  // All shards one behind the other, and each as a parameter; what an optimizer sees has the shared ones too.
  at::Tensor part_;
  std::vector<at::Tensor> shards_;
  NamedTensors seen_;
  bool gathered_ = false;
  std::unique_ptr<Work> gathering_;
  at::Tensor buffer_;
  std::vector<std::unique_ptr<Work>> reducing_;
  std::optional<AccumulatedGradients> gradients_;
  // How many members have a gradient, by parameter.
  at::Tensor present_;
  at::Tensor all_gradients_;
  at::Tensor gradient_part_;
};

}  // namespace

void require_shardable(const std::vector<StageToShard>& stages) {
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
        throw StageError(name + ": found " + dtype_name(parameter.scalar_type()) + ", expected " + dtype_name(*dtype) +
                         ", as the first has it: the sharded parameters of a stage have one dtype.");
      }
      if (!parameter.is_contiguous() || parameter.storage().nbytes() != parameter.nbytes()) {
        throw StageError(name + " is a view or not contiguous; sharded parameters have memory of their own.");
      }
      const auto [owner, is_new] = owners.try_emplace(parameter.storage().unsafeGetStorageImpl(),
                                                      Owner{module, parameter.unsafeGetTensorImpl(), name});
      // One tensor under several names of a stage is one parameter.
      if (is_new || (owner->second.module == module && owner->second.tensor == parameter.unsafeGetTensorImpl()))
        continue;
      throw StageError(name + " lies in the memory of " + owner->second.name +
                       "; sharded parameters have memory of their own.\n"
                       "  Hint: give each replica and each parameter a tensor of its own.");
    }
  }
  const auto require_apart = [&](const at::Tensor& tensor, const std::string& name) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto owner = owners.find(tensor.storage().unsafeGetStorageImpl());
    if (owner == owners.end()) return;
    throw StageError(name + " lies in the memory of " + owner->second.name +
                     ", which is sharded: sharded parameters have memory of their own.");
  };
  for (const auto& [module, shared, stage] : stages) {
    for (std::size_t i = 0; i < module->parameters.size(); ++i) {
      const auto& [name, parameter] = module->parameters[i];
      if (shared[i]) require_apart(parameter, parameter_name(stage, name));
    }
    for (const auto& [name, buffer] : module->buffers) {
      require_apart(buffer, "stage " + std::to_string(stage) + ", buffer '" + name + "'");
    }
  }
}

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    int stage, std::shared_ptr<Group> group, Deadline deadline) {
  return std::make_unique<ReplicatedParameters>(module, shared, stage, std::move(group), deadline);
}

std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline) {
  return std::make_unique<ShardedParameters>(module, shared, stage, std::move(group), deadline);
}

namespace {

std::vector<AccumulatedGradients::Parameter> accumulated(const NamedTensors& own) {
  std::vector<AccumulatedGradients::Parameter> parameters;
  for (const auto& [name, parameter] : own) parameters.push_back({name, parameter, parameter});
  return parameters;
}

}  // namespace

SharedSum::SharedSum(const NamedTensors& own, Groups groups, int replicas)
    : gradients_(accumulated(own)), groups_(std::move(groups)), replicas_(replicas) {}

void SharedSum::reduce(Deadline deadline) {
  const c10::AutoGradMode no_grad(false);
  if (groups_.holders) groups_.holders->barrier()->wait(deadline);
  if (!groups_.speakers) return;
  at::Tensor sum;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& gradient = gradients_.computed(i).grad();
    if (gradient.defined()) sum = sum.defined() ? sum.add(dense(gradient)) : dense(gradient).clone();
  }
  const at::Tensor present = at::full({1}, sum.defined() ? 1 : 0, at::TensorOptions(at::kFloat));
  if (!sum.defined()) sum = at::zeros_like(gradients_.computed(0)).detach();
  groups_.speakers->all_reduce({sum, present})->wait(deadline);
  sum.div_(replicas_);
  std::vector<at::Tensor> sums(gradients_.size());
  // Where nobody has a gradient there is none, as in one process.
  if (present.item<float>() > 0) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = i == 0 ? sum : sum.clone();
  }
  gradients_.end_reduction(sums);
}

}  // namespace penstock::internal
