#include "penstock/stage/parameters.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/stage/wiring.h"

namespace penstock {
namespace {

// Enough for a collective to be worth its start, and few enough that the first is under way before the last is ready.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;

void broadcast_from_first(const StageModule& module, Group& group, Deadline deadline) {
  std::vector<at::Tensor> tensors;
  for (const auto* named : {&module.parameters, &module.buffers}) {
    for (const auto& [name, tensor] : *named) tensors.push_back(tensor.detach());
  }
  group.broadcast(std::move(tensors), 0)->wait(deadline);
}

std::vector<at::Tensor> not_shared(const StageModule& module, const std::vector<bool>& shared) {
  std::vector<at::Tensor> own;
  for (std::size_t i = 0; i < module.parameters.size(); ++i) {
    if (!shared[i]) own.push_back(module.parameters[i].second);
  }
  return own;
}

class ReplicatedParameters : public ParameterSync {
 public:
  ReplicatedParameters(const StageModule& module, const std::vector<bool>& shared, std::shared_ptr<Group> group)
      : all_(module.parameters), group_(std::move(group)), contribution_(not_shared(module, shared)) {}

  const StageModule::NamedTensors& parameters() const override { return all_; }

  void begin_step() override { contribution_.begin_step(); }

  void reduce() override {
    const c10::AutoGradMode no_grad(false);
    const std::vector<at::Tensor>& own = contribution_.parameters();
    present_ = at::zeros({static_cast<std::int64_t>(own.size())});
    std::vector<at::Tensor> bucket{present_};
    std::size_t bytes = 0;
    for (std::size_t i = own.size(); i-- > 0;) {
      at::Tensor& gradient = own[i].mutable_grad();
      if (gradient.defined()) present_.data_ptr<float>()[i] = 1;
      gradient = gradient.defined() ? dense(gradient) : at::zeros_like(own[i]);
      bucket.push_back(gradient);
      bytes += gradient.nbytes();
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
    const std::vector<at::Tensor>& own = contribution_.parameters();
    for (std::size_t i = 0; i < own.size(); ++i) {
      at::Tensor& gradient = own[i].mutable_grad();
      if (present_.data_ptr<float>()[i] > 0) {
        gradient.div_(group_->size());
      } else {
        gradient.reset();
      }
    }
    contribution_.end_reduction();
  }

  void unshard() override {}
  void finish_unshard(Deadline /*deadline*/) override {}
  void reshard() override {}

  void abandon(bool had_begun) override {
    works_.clear();
    if (had_begun) contribution_.undo_step();
  }
  void join(std::shared_ptr<Group> group) override { group_ = std::move(group); }

 private:
  StageModule::NamedTensors all_;
  std::shared_ptr<Group> group_;
  Contribution contribution_;
  // How many members have a gradient, by parameter.
  at::Tensor present_;
  std::vector<std::unique_ptr<Work>> works_;
};

// The memory of a parameter, without autograd's knowing of it: what was saved for a backward finds it again.
void resize_storage(const at::Tensor& tensor, std::size_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

class ShardedParameters : public ParameterSync {
 public:
  ShardedParameters(const StageModule& module, const std::vector<bool>& shared, int stage, std::shared_ptr<Group> group)
      : stage_(stage), group_(std::move(group)) {
    const c10::AutoGradMode no_grad(false);
    const std::int64_t members = group_->size();
    std::vector<std::string> names;
    for (std::size_t i = 0; i < module.parameters.size(); ++i) {
      const auto& [name, parameter] = module.parameters[i];
      if (shared[i]) {
        seen_.emplace_back(name, parameter);
        continue;
      }
      names.push_back(name);
      if (!whole_.empty() && parameter.scalar_type() != whole_.front().scalar_type()) {
        throw StageError("stage " + std::to_string(stage) + ": parameter " + name +
                         " has another dtype than the first; "
                         "the sharded parameters of a stage have one dtype.");
      }
      if (!parameter.is_contiguous() || parameter.storage().nbytes() != parameter.nbytes()) {
        throw StageError("stage " + std::to_string(stage) + ": parameter " + name +
                         " is a view or not contiguous; sharded parameters have memory of their own.");
      }
      whole_.push_back(parameter);
      lengths_.push_back((parameter.numel() + members - 1) / members);
      length_ += lengths_.back();
    }
    if (whole_.empty()) return;
    part_ = at::zeros({length_}, whole_.front().options().requires_grad(false));
    std::int64_t first = 0;
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      const at::Tensor shard = part_.narrow(0, first, lengths_[i]);
      const std::int64_t begin = std::min(group_->member() * lengths_[i], whole_[i].numel());
      const std::int64_t count = std::min(lengths_[i], whole_[i].numel() - begin);
      shard.narrow(0, 0, count).copy_(whole_[i].detach().view(-1).narrow(0, begin, count));
      shards_.push_back(shard.detach().requires_grad_(whole_[i].requires_grad()));
      seen_.emplace_back(names[i], shards_.back());
      first += lengths_[i];
      resize_storage(whole_[i], 0);
    }
  }

  const StageModule::NamedTensors& parameters() const override { return seen_; }

  void begin_step() override {}

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
    gradients_ = at::zeros({length_ * group_->size()}, part_.options());
    for (const at::Tensor& parameter : whole_) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined()) gradient = dense(gradient);
    }
    for_each_piece([&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t in_buffer) {
      const at::Tensor& gradient = whole_[i].grad();
      if (gradient.defined()) {
        gradients_.narrow(0, in_buffer, count).copy_(gradient.view(-1).narrow(0, begin, count));
      }
    });
    present_ = at::zeros({static_cast<std::int64_t>(whole_.size())});
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      at::Tensor& gradient = whole_[i].mutable_grad();
      if (gradient.defined()) present_.data_ptr<float>()[i] = 1;
      gradient.reset();
    }
    gradient_part_ = at::empty({length_}, part_.options());
    reducing_.push_back(group_->reduce_scatter(gradient_part_, gradients_));
    reducing_.push_back(group_->all_reduce({present_}));
  }

  void finish_reduce(Deadline deadline) override {
    if (reducing_.empty()) return;
    for (const auto& work : std::exchange(reducing_, {})) work->wait(deadline);
    const c10::AutoGradMode no_grad(false);
    gradient_part_.div_(group_->size());
    std::int64_t first = 0;
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      const at::Tensor own = gradient_part_.narrow(0, first, lengths_[i]);
      first += lengths_[i];
      if (present_.data_ptr<float>()[i] == 0) continue;
      at::Tensor& gradient = shards_[i].mutable_grad();
      gradient = gradient.defined() ? gradient.add(own) : own.clone();
    }
    gradients_.reset();
    gradient_part_.reset();
  }

  void abandon(bool /*had_begun*/) override {
    gathering_.reset();
    reducing_.clear();
    buffer_.reset();
    gradients_.reset();
    gradient_part_.reset();
    reshard();
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

  int stage_;
  std::shared_ptr<Group> group_;
  // The module's own, and how long a shard of each is; the last may be padded.
  std::vector<at::Tensor> whole_;
  std::vector<std::int64_t> lengths_;
  std::int64_t length_ = 0;
  // All shards one behind the other, and each as a parameter; what an optimizer sees has the shared ones too.
  at::Tensor part_;
  std::vector<at::Tensor> shards_;
  StageModule::NamedTensors seen_;
  bool gathered_ = false;
  std::unique_ptr<Work> gathering_;
  at::Tensor buffer_;
  std::vector<std::unique_ptr<Work>> reducing_;
  // How many members have a gradient, by parameter.
  at::Tensor present_;
  at::Tensor gradients_;
  at::Tensor gradient_part_;
};

}  // namespace

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    std::shared_ptr<Group> group, Deadline deadline) {
  broadcast_from_first(module, *group, deadline);
  return std::make_unique<ReplicatedParameters>(module, shared, std::move(group));
}

std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline) {
  broadcast_from_first(module, *group, deadline);
  return std::make_unique<ShardedParameters>(module, shared, stage, std::move(group));
}

at::Tensor dense(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to_dense() : gradient.contiguous();
}

Contribution::Contribution(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  now_.set_aside.resize(parameters_.size());
}

void Contribution::begin_step() {
  const bool none_left =
      std::none_of(parameters_.begin(), parameters_.end(), [](const at::Tensor& one) { return one.grad().defined(); });
  // Without any gradient somebody has thrown them away, and with them those that were set aside.
  if (none_left) now_ = {.set_aside = std::vector<at::Tensor>(parameters_.size())};
  before_step_ = now_;
  if (now_.unreduced) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    now_.set_aside[i] = std::exchange(parameters_[i].mutable_grad(), {});
  }
  now_.unreduced = true;
}

void Contribution::end_reduction() {
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor before = std::exchange(now_.set_aside[i], {});
    if (!before.defined()) continue;
    at::Tensor& gradient = parameters_[i].mutable_grad();
    // Not into what was set aside: the step may still fail.
    gradient = gradient.defined() ? before.add(gradient) : before;
  }
  now_.unreduced = false;
}

void Contribution::undo_step() {
  now_ = before_step_;
}

namespace {

std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> distinct;
  for (const at::Tensor& tensor : tensors) {
    const bool seen =
        std::any_of(distinct.begin(), distinct.end(), [&](const at::Tensor& other) { return other.is_same(tensor); });
    if (!seen) distinct.push_back(tensor);
  }
  return distinct;
}

}  // namespace

SharedSum::SharedSum(const std::vector<at::Tensor>& own, Groups groups, int replicas)
    : contribution_(each_once(own)), groups_(std::move(groups)), replicas_(replicas) {}

void SharedSum::reduce(Deadline deadline) {
  const c10::AutoGradMode no_grad(false);
  if (groups_.holders) groups_.holders->barrier()->wait(deadline);
  if (!groups_.speakers) return;
  const std::vector<at::Tensor>& own = contribution_.parameters();
  at::Tensor sum;
  for (const at::Tensor& one : own) {
    if (one.grad().defined()) sum = sum.defined() ? sum.add(dense(one.grad())) : dense(one.grad()).clone();
  }
  const at::Tensor present = at::full({1}, sum.defined() ? 1 : 0, at::TensorOptions(at::kFloat));
  if (!sum.defined()) sum = at::zeros_like(own.front()).detach();
  groups_.speakers->all_reduce({sum, present})->wait(deadline);
  sum.div_(replicas_);
  // Where nobody has a gradient there is none, as in one process.
  if (present.item<float>() > 0) {
    for (std::size_t i = 0; i < own.size(); ++i) own[i].mutable_grad() = i == 0 ? sum : sum.clone();
  }
  contribution_.end_reduction();
}

}  // namespace penstock
