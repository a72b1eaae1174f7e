// Parameters that are whole in each replica. Gradients are averaged by all-reduces of buckets.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <utility>

#include "penstock/stage/accumulation.h"
#include "penstock/stage/first_member_values.h"
#include "penstock/stage/parameter_sync.h"

namespace penstock::internal {
namespace {

// Size at which a bucket of gradients is reduced: large enough to amortise the start of a collective, small enough that
// the first collective is in flight before the last bucket is ready.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;

std::vector<AccumulatedGradients::Parameter> not_shared(const StageModule& module, const std::vector<bool>& shared,
                                                        int stage) {
  std::vector<AccumulatedGradients::Parameter> result;
  for (std::size_t i = 0; i < module.parameters.size(); ++i) {
    const auto& [name, parameter] = module.parameters[i];
    if (!shared[i]) result.push_back({parameter_name(stage, name), parameter, parameter});
  }
  return result;
}

class ReplicatedParameters final : public ParameterSync {
 public:
  ReplicatedParameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                       std::shared_ptr<Group> group, Deadline deadline)
      : parameters_(module.parameters),
        group_(std::move(group)),
        initial_(module, *group_, deadline),
        gradients_(not_shared(module, shared, stage)) {}

  const NamedTensors& parameters() const override { return parameters_; }
  void adopt() override { initial_.adopt(); }

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
      reductions_.push_back(group_->all_reduce(std::exchange(bucket, {})));
      bytes = 0;
    }
    if (!bucket.empty()) reductions_.push_back(group_->all_reduce(std::move(bucket)));
  }

  void finish_reduce(Deadline deadline) override {
    if (reductions_.empty()) return;
    for (const auto& work : std::exchange(reductions_, {})) work->wait(deadline);
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      // Where no member has a gradient there is none, as in one process.
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
    reductions_.clear();
    sums_.clear();
    gradients_.rollback();
  }
  void join(std::shared_ptr<Group> group) override { group_ = std::move(group); }

 private:
  NamedTensors parameters_;
  std::shared_ptr<Group> group_;
  FirstMemberValues initial_;
  AccumulatedGradients gradients_;
  // The gradient of each parameter that is summed, and the number of members that have one.
  std::vector<at::Tensor> sums_;
  at::Tensor present_;
  std::vector<std::unique_ptr<Work>> reductions_;
};

}  // namespace

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    int stage, std::shared_ptr<Group> group, Deadline deadline) {
  return std::make_unique<ReplicatedParameters>(module, shared, stage, std::move(group), deadline);
}

}  // namespace penstock::internal
