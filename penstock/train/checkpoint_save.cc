#include "penstock/train/checkpoint_save.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/runtime/error.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/gradients.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {
namespace {

// Appends the tensors whose names are new: stages of one rank may share a parameter.
void add_new(const NamedTensors& tensors, NamedTensors& all) {
  for (const auto& named : tensors) {
    const auto has_name = [&](const auto& other) { return other.first == named.first; };
    if (std::ranges::none_of(all, has_name)) all.push_back(named);
  }
}

}  // namespace

CheckpointSave::CheckpointSave(const CheckpointSource& source, CopyStreams& streams, const std::string& directory,
                               int keep, CheckpointInfo info, StageSnapshot::Use use)
    : source_(source),
      writer_(directory, info.step),
      keep_(keep),
      info_(std::move(info)),
      use_(use),
      snapshot_(source.stages, streams, use) {}

CheckpointSave::~CheckpointSave() {
  join();
}

void CheckpointSave::run_phase(const std::function<void()>& act) {
  std::exception_ptr failure;
  try {
    act();
  } catch (...) {
    failure = std::current_exception();
  }
  bool any_failed = false;
  // All processes take part in this collective, even if one has failed.
  try {
    any_failed = source_.processes.sum({failure ? 1.0 : 0.0}).front() > 0;
  } catch (const PipelineError&) {
    if (!failure) throw;
  }
  if (!failure && !any_failed) return;
  state_ = State::Ended;
  // All ranks have completed this phase, so none still writes to the checkpoint.
  if (source_.processes.is_coordinator()) writer_.discard();
  if (failure) std::rethrow_exception(failure);
  throw CheckpointError(path() + ": another rank could not write its part.");
}

void CheckpointSave::wait_for_copies(Deadline deadline) const {
  if (snapshot_.wait(deadline)) return;
  throw CheckpointError(path() + ": is not written, because a device has not sent its tensors within the timeout.");
}

void CheckpointSave::require_finite_parameters() const {
  for (const TrainedStage& stage : source_.stages) {
    for (const auto& [name, parameter] : snapshot_.of(stage).parameters) {
      if (std::isfinite(sum_of_squares(parameter))) continue;
      throw CheckpointError(concat(path(), ": is not written, because parameter ", name, " of stage ",
                                   stage.stage->stage_index(),
                                   " is not finite; earlier checkpoints remain.\n  Hint: lower the learning rate or "
                                   "lower the clipping norm, and resume from the last of them."));
    }
  }
}

at::Tensor CheckpointSave::local_shards(const TrainedStage& stage, const std::string& name,
                                        NamedTensors StageSnapshot::Tensors::* kind) const {
  std::vector<at::Tensor> shards;
  for (const TrainedStage& other : source_.stages) {
    if (other.stage->stage_index() != stage.stage->stage_index()) continue;
    for (const auto& [other_name, shard] : snapshot_.of(other).*kind) {
      if (other_name == name) shards.push_back(shard);
    }
  }
  return at::cat(shards);
}

NamedTensors CheckpointSave::unsharded(const TrainedStage& stage, NamedTensors StageSnapshot::Tensors::* kind) const {
  const TrainingProcesses& processes = source_.processes;
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : stage.stage->module().parameters) parameters.emplace(name, parameter);
  NamedTensors result;
  for (const auto& [full_name, tensor] : snapshot_.of(stage).*kind) {
    // "NAME" of a parameter, or "NAME.exp_avg" of optimizer state.
    std::string name = full_name;
    std::string suffix;
    if (!parameters.contains(name) && name.rfind('.') != std::string::npos) {
      suffix = name.substr(name.rfind('.'));
      name.resize(name.size() - suffix.size());
    }
    at::Tensor value = tensor;
    const auto parameter = parameters.find(name);
    const bool is_shard = source_.sharded && parameter != parameters.end() && value.dim() > 0 &&
                          value.sizes() != parameter->second.sizes() && processes.replicas() > 1;
    if (is_shard) {
      const at::Tensor gathered =
          processes.are_threads() ? local_shards(stage, full_name, kind) : processes.gather_shards(value);
      value = gathered.narrow(0, 0, parameter->second.numel()).view(parameter->second.sizes());
    }
    for (const std::string& alias : parameter == parameters.end() ? std::vector{name} : source_.model.names_of(name)) {
      result.emplace_back(alias + suffix, value);
    }
  }
  return result;
}

void CheckpointSave::gather_parts() {
  // Every replica takes part in gathering shards; the first replica writes.
  for (const TrainedStage& stage : source_.stages) {
    NamedTensors weights = unsharded(stage, &StageSnapshot::Tensors::parameters);
    const NamedTensors optimizer = unsharded(stage, &StageSnapshot::Tensors::optimizer);
    if (stage.replica != 0) continue;
    for (const auto& [name, buffer] : snapshot_.of(stage).buffers) {
      for (const std::string& alias : source_.model.names_of(name)) weights.emplace_back(alias, buffer);
    }
    Part& part = parts_[stage.rank];
    add_new(weights, part.weights);
    add_new(optimizer, part.optimizer);
  }
}

void CheckpointSave::write_parts() {
  try {
    if (use_ == StageSnapshot::Use::BesideTraining) require_finite_parameters();
    for (const auto& [rank, part] : parts_) writer_.write_part(rank, part.weights, part.optimizer);
  } catch (...) {
    write_failure_ = std::current_exception();
  }
  is_written_ = true;
}

void CheckpointSave::begin_writing(Deadline copied) {
  run_phase([&] {
    wait_for_copies(copied);
    if (use_ == StageSnapshot::Use::BeforeTraining) require_finite_parameters();
  });
  gather_parts();
  run_phase([&] {
    if (source_.processes.is_coordinator()) writer_.begin();
  });
  state_ = State::Writing;
  if (use_ == StageSnapshot::Use::BeforeTraining) return write_parts();
  try {
    thread_ = start_thread([this] {
      const IntraOpThreads one_thread(1);
      write_parts();
    });
  } catch (...) {
    write_failure_ = std::current_exception();
    is_written_ = true;
  }
}

void CheckpointSave::join() {
  if (thread_.joinable()) thread_.join();
}

void CheckpointSave::write_manifest() {
  info_.model = source_.model.description();
  info_.non_persistent_buffers = source_.model.non_persistent_buffers();
  writer_.finish(info_, source_.schedule.ranks(), keep_);
}

void CheckpointSave::complete() {
  join();
  run_phase([&] {
    if (write_failure_) std::rethrow_exception(write_failure_);
  });
  run_phase([&] {
    if (source_.processes.is_coordinator()) write_manifest();
  });
  state_ = State::Ended;
}

bool CheckpointSave::poll() {
  if (state_ == State::Copying) {
    begin_writing(deadline_after(source_.processes.timeout()));
    return false;
  }
  const double written = source_.processes.sum({is_written_ ? 1.0 : 0.0}).front();
  if (written < source_.processes.count()) return false;
  complete();
  return true;
}

void CheckpointSave::finish() {
  if (state_ == State::Copying) begin_writing(deadline_after(source_.processes.timeout()));
  complete();
}

bool CheckpointSave::finish_after_failure(Deadline copied) noexcept {
  if (state_ == State::Ended) return false;
  try {
    if (source_.processes.are_threads()) {
      if (state_ == State::Copying) begin_writing(copied);
      complete();
      return true;
    }
    join();
    const bool is_coordinator = source_.processes.is_coordinator();
    // A rank that has failed leaves no list of its files.
    const bool is_written = state_ == State::Writing && !write_failure_;
    if (is_coordinator && is_written && writer_.has_parts(source_.schedule.ranks())) {
      write_manifest();
      state_ = State::Ended;
      return true;
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): the failure of the run is reported
  }
  state_ = State::Ended;
  if (source_.processes.is_coordinator()) writer_.discard();
  return false;
}

}  // namespace penstock::internal
