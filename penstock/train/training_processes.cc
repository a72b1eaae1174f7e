#include "penstock/train/training_processes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/runtime/error.h"

namespace penstock::internal {

TrainingProcesses::TrainingProcesses(std::shared_ptr<Transport> transport, int ranks, int thread_replicas,
                                     std::chrono::milliseconds timeout, const std::int64_t& steps_done)
    : transport_(std::move(transport)),
      ranks_(ranks),
      replicas_(transport_ == nullptr ? thread_replicas : transport_->ranks() / ranks),
      timeout_(timeout),
      steps_done_(steps_done) {
  if (transport_ == nullptr) return;
  std::vector<int> all(static_cast<std::size_t>(transport_->ranks()));
  std::iota(all.begin(), all.end(), 0);
  everyone_ = transport_->group(all);
  std::vector<int> peers;
  for (int replica = 0; replica < replicas_; ++replica) peers.push_back(transport_->rank() % ranks + replica * ranks);
  peers_ = transport_->group(peers);
}

void TrainingProcesses::complete(const std::function<std::unique_ptr<Work>()>& begin) const {
  try {
    begin()->wait(deadline_after(timeout_));
  } catch (const TransportError& error) {
    const std::string name = concat("rank ", transport_->rank());
    transport_->abort(name + " has failed");
    std::ostringstream message;
    message << name << ", after step " << steps_done_ << ": " << error.what();
    if (error.why() == TransportError::Why::Timeout) {
      message << " of " << std::chrono::duration<double>(timeout_).count() << " s";
    }
    const auto reports = transport_->reports(Clock::now() + Transport::kReportTime);
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      if (!reports[rank]) message << "\n  rank " << rank << ": did not answer";
      // A rank that has something to report is still in its pipeline step.
      if (reports[rank] && !reports[rank]->empty()) message << "\n  rank " << rank << ": was in a step";
    }
    throw PipelineError(message.str());
  }
}

std::vector<double> TrainingProcesses::sum(std::vector<double> numbers) const {
  if (everyone_ == nullptr) return numbers;
  const at::Tensor sums = at::tensor(numbers, at::kDouble);
  complete([&] { return everyone_->all_reduce({sums}); });
  std::copy_n(sums.const_data_ptr<double>(), numbers.size(), numbers.begin());
  return numbers;
}

void TrainingProcesses::sum_in_place(const std::vector<double*>& numbers) const {
  std::vector<double> values;
  for (const double* number : numbers) values.push_back(*number);
  values = sum(std::move(values));
  for (std::size_t i = 0; i < numbers.size(); ++i) *numbers[i] = values[i];
}

void TrainingProcesses::broadcast(const at::Tensor& tensor, int root) const {
  complete([&] { return everyone_->broadcast({tensor}, root); });
}

at::Tensor TrainingProcesses::gather_shards(const at::Tensor& shard) const {
  const at::Tensor gathered = at::empty({shard.numel() * replicas_}, shard.options());
  complete([&] { return peers_->all_gather(gathered, shard.contiguous()); });
  return gathered;
}

}  // namespace penstock::internal
