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

#include "penstock/transport/unprofiled.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {
namespace {

// Up to here, one exchange of everything takes less time than a sum in parts.
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

// The sum of `count` parts that lie one behind the other.
at::Tensor sum_of(const at::Tensor& parts, std::int64_t count) {
  const std::int64_t length = parts.numel() / count;
  at::Tensor sum = part_of(parts, 0, length).clone();
  for (std::int64_t i = 1; i < count; ++i) sum.add_(part_of(parts, i, length));
  return sum;
}

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().contiguous().view(-1);
}

// Of the elements, whatever they are.
at::Tensor flat_bytes(const at::Tensor& contiguous) {
  return contiguous.view(-1).view(at::kByte);
}

}  // namespace

// What the backend does, and what is to be done with the result by whoever waits for it.
class C10dGroup::Collective : public Work {
 public:
  explicit Collective(std::shared_ptr<C10dGroup> group) : group_(std::move(group)) {}

  void wait(Deadline deadline) override {
    for (const auto& work : works) group_->wait(*work, deadline);
    works.clear();
    const c10::AutoGradMode no_grad(false);
    for (const auto& act : std::exchange(afterwards, {})) act();
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::function<void()>> afterwards;

 private:
  std::shared_ptr<C10dGroup> group_;
};

C10dGroup::C10dGroup(std::shared_ptr<ControlChannel> control, c10::intrusive_ptr<c10d::Backend> backend)
    : control_(std::move(control)), backend_(std::move(backend)) {}

C10dGroup::~C10dGroup() {
  // A backend waits for what is under way when it is dropped.
  tear_down();
  begun_.clear();
}

void C10dGroup::tear_down() noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(begun_, [](const auto& work) { return work->isCompleted(); });
  if (begun_.empty()) return;
  try {
    // A receive that is late closes all connections of its group, and so ends what uses them.
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    unprofiled([&] {
      return backend_->recv(nothing, member() == 0 ? 1 : 0, kTearDownTag);
    })->wait(std::chrono::milliseconds(1));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): just that
  }
}

template <class Begin>
void C10dGroup::begin(Collective& collective, const Begin& begin_one) {
  const std::lock_guard lock(mutex_);
  control_->throw_if_aborted();
  std::erase_if(begun_, [](const auto& work) { return work->isCompleted(); });
  try {
    collective.works.push_back(unprofiled([&] { return begin_one(*backend_); }));
  } catch (const std::exception& error) {
    control_->throw_connection_lost(TransportError::kNoPeer, error);
  }
  begun_.push_back(collective.works.back());
}

void C10dGroup::wait(c10d::Work& work, Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  try {
    work.wait(std::clamp(left, std::chrono::milliseconds(1), kForever));
  } catch (const std::exception& error) {
    if (work.isCompleted()) control_->throw_connection_lost(TransportError::kNoPeer, error);
    control_->throw_if_aborted();
    throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                         "not all ranks of a group have come within the deadline");
  }
}

std::unique_ptr<Work> C10dGroup::all_reduce(std::vector<at::Tensor> tensors) {
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (!backend_) return collective;
  const c10::AutoGradMode no_grad(false);
  // Many small ones go together. All members find the same ones small.
  std::map<at::ScalarType, std::vector<at::Tensor>> small;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() > kSmallBytes && has_sum(tensor.scalar_type())) {
      sum_by_backend(*collective, tensor);
    } else if (tensor.numel() > 0) {
      small[tensor.scalar_type()].push_back(tensor);
    }
  }
  for (auto& [dtype, some] : small) sum_by_gathering(*collective, std::move(some));
  return collective;
}

void C10dGroup::sum_by_backend(Collective& collective, const at::Tensor& tensor) {
  at::Tensor sum = flat(tensor);
  begin(collective, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> sums{sum};
    return backend.allreduce(sums);
  });
  if (sum.data_ptr() == tensor.data_ptr()) return;
  collective.afterwards.emplace_back([tensor, sum] { tensor.detach().copy_(sum.view(tensor.sizes())); });
}

void C10dGroup::sum_by_gathering(Collective& collective, std::vector<at::Tensor> tensors) {
  std::vector<at::Tensor> own;
  for (const at::Tensor& tensor : tensors) own.push_back(flat(tensor));
  at::Tensor part = own.size() == 1 ? own.front() : at::cat(own);
  at::Tensor parts = at::empty({part.numel() * size()}, part.options());
  begin(collective, [&](c10d::Backend& backend) {
    at::Tensor to = flat_bytes(parts);
    at::Tensor from = flat_bytes(part);
    return backend._allgather_base(to, from);
  });
  collective.afterwards.emplace_back([tensors = std::move(tensors), parts, count = size()] {
    const at::Tensor sum = sum_of(parts, count);
    std::int64_t at = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.detach().copy_(sum.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  });
}

namespace {

void require_parts(const char* what, const at::Tensor& whole, const at::Tensor& part, int size) {
  if (whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type() && whole.is_contiguous() &&
      part.is_contiguous()) {
    return;
  }
  const auto text = [](const at::Tensor& tensor) { return to_string(TensorMeta(tensor)); };
  throw std::invalid_argument(std::string(what) + " over " + std::to_string(size) + " ranks: the whole is " +
                              text(whole) + " and the part is " + text(part) +
                              "; they should be contiguous, of one type, and the whole as large as all parts.");
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
  begin(*collective, [&](c10d::Backend& backend) {
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
  // Everybody's contributions to this member's part, to be added up here: as much travels as in a sum in parts.
  at::Tensor parts = at::empty({whole.numel()}, whole.options());
  begin(*collective, [&](c10d::Backend& backend) {
    at::Tensor to = flat_bytes(parts);
    at::Tensor from = flat_bytes(whole);
    std::vector<std::int64_t> equal;
    return backend.alltoall_base(to, from, equal, equal);
  });
  collective->afterwards.emplace_back([part, parts, count = size()] { part.view(-1).copy_(sum_of(parts, count)); });
  return collective;
}

std::unique_ptr<Work> C10dGroup::broadcast(std::vector<at::Tensor> tensors, int root) {
  if (root < 0 || root >= size()) {
    throw std::invalid_argument("broadcast: there is no member " + std::to_string(root) + " in a group of " +
                                std::to_string(size()) + ".");
  }
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (!backend_) return collective;
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const at::Tensor contiguous = tensor.detach().contiguous();
    begin(*collective, [&](c10d::Backend& backend) {
      std::vector<at::Tensor> bytes{flat_bytes(contiguous)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return backend.broadcast(bytes, options);
    });
    if (member() == root || contiguous.data_ptr() == tensor.data_ptr()) continue;
    collective->afterwards.emplace_back([tensor, contiguous] { tensor.detach().copy_(contiguous); });
  }
  return collective;
}

std::unique_ptr<Work> C10dGroup::barrier() {
  auto collective = std::make_unique<Collective>(shared_from_this());
  if (backend_) begin(*collective, [](c10d::Backend& backend) { return backend.barrier(); });
  return collective;
}

}  // namespace penstock::internal
