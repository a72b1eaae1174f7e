#include "penstock/transport/staged_group.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "penstock/device/host_copies.h"
#include "penstock/device/streams.h"

namespace penstock::internal {

// A collective that the thread of the group runs.
class StagedGroup::StagedWork : public Work {
 public:
  StagedWork(std::shared_ptr<C10dGroup> group, std::shared_ptr<StagingThread> thread, std::vector<OnHost> results)
      : group_(std::move(group)), thread_(std::move(thread)), results_(std::move(results)) {}

  // Returns the function that the thread of the group calls.
  std::function<void()> runner(StagedGroup& group, Start start) {
    return [&group, state = state_, start = std::move(start)] {
      std::exception_ptr error;
      try {
        // An abort ends this wait, and so does the group's destructor.
        group.start(start)->wait(Deadline::max());
      } catch (...) {
        error = std::current_exception();
      }
      const MonitorLock lock(state->monitor);
      state->is_done = true;
      state->error = error;
      state->monitor.notify_all();
    };
  }

  void wait(Deadline deadline) override {
    {
      const MonitorLock lock(state_->monitor);
      const auto is_done = [this]() PENSTOCK_REQUIRES(state_->monitor) { return state_->is_done; };
      // Neither an abort nor an error of the device wakes this wait while the thread waits for the device.
      while (state_->monitor.wait(std::min(deadline, Clock::now() + StagingThread::kPause), is_done) !=
             WaitResult::Ready) {
        group_->throw_if_aborted();
        thread_->throw_if_failed();
        if (Clock::now() < deadline) continue;
        throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                             "not all ranks of a group have arrived within the deadline");
      }
      if (state_->error) std::rethrow_exception(state_->error);
    }
    const c10::AutoGradMode no_grad(false);
    for (const auto& [given, host] : std::exchange(results_, {})) {
      if (!given.is_same(host)) given.copy_(host, /*non_blocking=*/true);
    }
  }

 private:
  struct State {
    Monitor monitor{Clock::duration::zero()};
    bool is_done PENSTOCK_GUARDED_BY(monitor) = false;
    std::exception_ptr error PENSTOCK_GUARDED_BY(monitor);
  };

  std::shared_ptr<C10dGroup> group_;
  std::shared_ptr<StagingThread> thread_;
  std::vector<OnHost> results_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

void StagedGroup::stop() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  if (thread_->has_started()) group_->tear_down();
  thread_->stop();
}

std::unique_ptr<Work> StagedGroup::start(const Start& start) {
  const MutexLock lock(mutex_);
  if (!ending_) return start(*group_);
  throw TransportError(TransportError::Why::Aborted, TransportError::kNoPeer, "the group of ranks has ended");
}

bool StagedGroup::must_stage(const std::vector<at::Tensor>& tensors) const {
  return thread_->has_started() || !devices_of(tensors).empty();
}

StagedGroup::OnHost StagedGroup::on_host(const at::Tensor& tensor, bool is_read, StreamPoint& ready) {
  const at::Tensor given = tensor.detach();
  if (given.is_cpu()) return {given, given};
  if (!is_read) {
    return {given, at::empty_like(given, given.options().device(at::kCPU).pinned_memory(true))};
  }
  return {given, copy_to_host(given, copies_, ready)};
}

std::unique_ptr<Work> StagedGroup::stage(StreamPoint ready, Start start, std::vector<OnHost> results) {
  auto work = std::make_unique<StagedWork>(group_, thread_, std::move(results));
  thread_->add(std::move(ready), work->runner(*this, std::move(start)));
  return work;
}

std::unique_ptr<Work> StagedGroup::all_reduce(std::vector<at::Tensor> tensors) {
  if (!must_stage(tensors)) return group_->all_reduce(std::move(tensors));
  const c10::AutoGradMode no_grad(false);
  StreamPoint ready;
  std::vector<OnHost> results;
  std::vector<at::Tensor> hosts;
  for (const at::Tensor& tensor : tensors) {
    hosts.push_back(results.emplace_back(on_host(tensor, /*is_read=*/true, ready)).host);
  }
  return stage(std::move(ready), [hosts](Group& group) { return group.all_reduce(hosts); }, std::move(results));
}

std::unique_ptr<Work> StagedGroup::all_gather(at::Tensor whole, at::Tensor part) {
  if (!must_stage({whole, part})) return group_->all_gather(std::move(whole), std::move(part));
  const c10::AutoGradMode no_grad(false);
  StreamPoint ready;
  const at::Tensor from = on_host(part, /*is_read=*/true, ready).host;
  const OnHost to = on_host(whole, /*is_read=*/false, ready);
  return stage(std::move(ready), [to = to.host, from](Group& group) { return group.all_gather(to, from); }, {to});
}

std::unique_ptr<Work> StagedGroup::reduce_scatter(at::Tensor part, at::Tensor whole) {
  if (!must_stage({part, whole})) return group_->reduce_scatter(std::move(part), std::move(whole));
  const c10::AutoGradMode no_grad(false);
  StreamPoint ready;
  const at::Tensor from = on_host(whole, /*is_read=*/true, ready).host;
  const OnHost to = on_host(part, /*is_read=*/false, ready);
  return stage(std::move(ready), [to = to.host, from](Group& group) { return group.reduce_scatter(to, from); }, {to});
}

std::unique_ptr<Work> StagedGroup::broadcast(std::vector<at::Tensor> tensors, int root) {
  if (!must_stage(tensors)) return group_->broadcast(std::move(tensors), root);
  const c10::AutoGradMode no_grad(false);
  const bool is_root = member() == root;
  StreamPoint ready;
  std::vector<OnHost> results;
  std::vector<at::Tensor> hosts;
  for (const at::Tensor& tensor : tensors) {
    hosts.push_back(results.emplace_back(on_host(tensor, is_root, ready)).host);
  }
  if (is_root) results.clear();
  return stage(
      std::move(ready), [hosts, root](Group& group) { return group.broadcast(hosts, root); }, std::move(results));
}

std::unique_ptr<Work> StagedGroup::barrier() {
  if (!must_stage({})) return group_->barrier();
  // Other members may use afterwards what this one's devices are still computing.
  return stage(StreamPoint::now(RankStreams::devices_of_thread()), [](Group& group) { return group.barrier(); }, {});
}

}  // namespace penstock::internal
