#include "penstock/transport/c10d_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/transport/unprofiled.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {
namespace {

// Up to this size, gathering all contributions takes less time than a reduction in parts.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10U;

// A tag that no collective uses.
constexpr int kTearDownTag = 0x7fffffff;

bool has_sum(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

at::Tensor part_of(const at::Tensor& whole, std::int64_t index, std::int64_t length) {
  return whole.narrow(0, index * length, length);
}

// Returns the sum of `count` consecutive parts.
at::Tensor sum_of(const at::Tensor& parts, std::int64_t count) {
  const std::int64_t length = parts.numel() / count;
  at::Tensor sum = part_of(parts, 0, length).clone();
  for (std::int64_t i = 1; i < count; ++i) sum.add_(part_of(parts, i, length));
  return sum;
}

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().contiguous().view(-1);
}

// Returns the elements as bytes, so that backends transfer every dtype.
at::Tensor flat_bytes(const at::Tensor& contiguous) {
  return contiguous.view(-1).view(at::kByte);
}

}  // namespace

// The backend's operations of one collective, and what wait() does with their results.
class C10dGroup::Collective : public Work {
 public:
  explicit Collective(std::shared_ptr<C10dGroup> group) : group_(std::move(group)) {}

  void wait(Deadline deadline) override {
    for (const auto& work : works) group_->wait(work, deadline);
    works.clear();
    const c10::AutoGradMode no_grad(false);
    for (const auto& finish : std::exchange(on_complete, {})) finish();
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::function<void()>> on_complete;

 private:
  std::shared_ptr<C10dGroup> group_;
};

C10dGroup::C10dGroup(std::shared_ptr<ControlChannel> control, c10::intrusive_ptr<c10d::Backend> backend)
    : control_(std::move(control)), backend_(std::move(backend)) {}

C10dGroup::~C10dGroup() {
  // A backend's destructor waits for the operations in flight.
  C10dGroup::tear_down();
  in_flight_.clear();
}

void C10dGroup::forget() noexcept {
  const MutexLock lock(mutex_);
  in_flight_.clear();
}

void C10dGroup::tear_down() noexcept {
  const MutexLock lock(mutex_);
  std::erase_if(in_flight_, [](const auto& work) { return work->isCompleted(); });
  if (in_flight_.empty()) return;
  // A receive that times out closes all connections of its group, and so ends the operations that use them. One from a
  // member that has closed its connection already throws at once, and leaves the others open.
  for (int from = 0; from < size(); ++from) {
    if (from == member()) continue;
    try {
      std::vector<at::Tensor> unused{at::empty({1}, at::kByte)};
      unprofiled([&] { return backend_->recv(unused, from, kTearDownTag); })->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the timeout is intended
    }
  }
}

void C10dGroup::start(Collective& collective, const StartOn& start_on) {
  const MutexLock lock(mutex_);
  control_->throw_if_aborted();
  std::erase_if(in_flight_, [](const auto& work) { return work->isCompleted(); });
  try {
    collective.works.push_back(unprofiled([&] { return start_on(*backend_); }));
  } catch (const std::exception& error) {
    control_->throw_connection_lost(TransportError::kNoPeer, error);
  }
  in_flight_.push_back(collective.works.back());
}

void C10dGroup::wait(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  try {
    work->wait(std::clamp(left, std::chrono::milliseconds(1), kForever));
  } catch (const std::exception& error) {
    if (work->isCompleted()) control_->throw_connection_lost(TransportError::kNoPeer, error);
    control_->throw_if_aborted();
    throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                         concat(kNotAllHaveArrived, " within the deadline"));
  }
}

bool C10dGroup::is_summed_by_backend(const at::Tensor& tensor) {
  return tensor.nbytes() > kSmallBytes && has_sum(tensor.scalar_type());
}

std::unique_ptr<Work> C10dGroup::all_reduce(std::vector<at::Tensor> tensors) {
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (!backend_) return collective;
  const c10::AutoGradMode no_grad(false);
  // Small tensors are sent together. All members classify the tensors alike.
  std::map<at::ScalarType, std::vector<at::Tensor>> small;
  for (const at::Tensor& tensor : tensors) {
    if (is_summed_by_backend(tensor)) {
      sum_by_backend(*collective, tensor);
    } else if (tensor.numel() > 0) {
      small[tensor.scalar_type()].push_back(tensor);
    }
  }
  for (auto& [dtype, group] : small) sum_by_gathering(*collective, std::move(group));
  return collective;
}

void C10dGroup::sum_by_backend(Collective& collective, const at::Tensor& tensor) {
  at::Tensor sum = flat(tensor);
  start(collective, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> sums{sum};
    return backend.allreduce(sums);
  });
  if (sum.data_ptr() == tensor.data_ptr()) return;
  collective.on_complete.emplace_back([tensor, sum] { tensor.detach().copy_(sum.view(tensor.sizes())); });
}

void C10dGroup::sum_by_gathering(Collective& collective, std::vector<at::Tensor> tensors) {
  std::vector<at::Tensor> flattened;
  for (const at::Tensor& tensor : tensors) flattened.push_back(flat(tensor));
  at::Tensor part = flattened.size() == 1 ? flattened.front() : at::cat(flattened);
  sum_gathered(collective, part, [tensors = std::move(tensors)](const at::Tensor& sum) {
    std::int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.detach().copy_(sum.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  });
}

void C10dGroup::sum_gathered(Collective& collective, const at::Tensor& contribution,
                             std::function<void(const at::Tensor&)> use) {
  at::Tensor parts = at::empty({contribution.numel() * size()}, contribution.options());
  start(collective, [&](c10d::Backend& backend) {
    at::Tensor to = flat_bytes(parts);
    at::Tensor from = flat_bytes(contribution);
    return backend._allgather_base(to, from);
  });
  collective.on_complete.emplace_back([parts, count = size(), use = std::move(use)] { use(sum_of(parts, count)); });
}

namespace {

void require_parts(const char* collective, const at::Tensor& whole, const at::Tensor& part, int size) {
  if (whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type() && whole.is_contiguous() &&
      part.is_contiguous()) {
    return;
  }
  const auto text = [](const at::Tensor& tensor) { return to_string(TensorMeta(tensor)); };
  throw std::invalid_argument(concat(collective, " over ", size, " ranks: the whole is ", text(whole),
                                     " and the part is ", text(part),
                                     "; they should be contiguous, of one type, and the whole as large as all parts."));
}

}  // namespace

std::unique_ptr<Work> C10dGroup::all_gather(at::Tensor whole, at::Tensor part) {
  require_parts("all_gather", whole, part, size());
  auto collective = std::make_unique<Collective>(shared_from_this());
  const c10::AutoGradMode no_grad(false);
  whole = whole.detach();
  part = part.detach();
  if (!backend_) whole.view(-1).copy_(part.view(-1));
  if (!backend_ || part.numel() == 0) return collective;
  start(*collective, [&](c10d::Backend& backend) {
    at::Tensor to = flat_bytes(whole);
    at::Tensor from = flat_bytes(part);
    return backend._allgather_base(to, from);
  });
  return collective;
}

std::unique_ptr<Work> C10dGroup::reduce_scatter(at::Tensor part, at::Tensor whole) {
  require_parts("reduce_scatter", whole, part, size());
  auto collective = std::make_unique<Collective>(shared_from_this());
  const c10::AutoGradMode no_grad(false);
  whole = whole.detach();
  part = part.detach();
  if (!backend_) part.view(-1).copy_(whole.view(-1));
  if (!backend_ || part.numel() == 0) return collective;
  sum_parts(*collective, part, whole);
  return collective;
}

void C10dGroup::sum_parts(Collective& collective, const at::Tensor& part, const at::Tensor& whole) {
  // All members send their contributions to this member's part, which sums them. The amount of data is that of a
  // reduction in parts.
  at::Tensor parts = at::empty({whole.numel()}, whole.options());
  start(collective, [&](c10d::Backend& backend) {
    at::Tensor to = flat_bytes(parts);
    at::Tensor from = flat_bytes(whole);
    std::vector<std::int64_t> equal;
    return backend.alltoall_base(to, from, equal, equal);
  });
  collective.on_complete.emplace_back([part, parts, count = size()] { part.view(-1).copy_(sum_of(parts, count)); });
}

std::unique_ptr<Work> C10dGroup::broadcast(std::vector<at::Tensor> tensors, int root) {
  if (root < 0 || root >= size()) {
    throw std::invalid_argument(concat("broadcast: there is no member ", root, " in a group of ", size(), "."));
  }
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (!backend_) return collective;
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const at::Tensor contiguous = tensor.detach().contiguous();
    start(*collective, [&](c10d::Backend& backend) {
      std::vector<at::Tensor> bytes{flat_bytes(contiguous)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return backend.broadcast(bytes, options);
    });
    if (member() == root || contiguous.data_ptr() == tensor.data_ptr()) continue;
    collective->on_complete.emplace_back([tensor, contiguous] { tensor.detach().copy_(contiguous); });
  }
  return collective;
}

std::unique_ptr<Work> C10dGroup::barrier() {
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (backend_) start(*collective, [](c10d::Backend& backend) { return backend.barrier(); });
  return collective;
}

}  // namespace penstock::internal
