// Runs one batch through a pipeline, on thread ranks or process ranks.
#pragma once

#include <string>

#include "penstock/cli/program/local_ranks.h"
#include "penstock/cli/program/options.h"
#include "penstock/device/device_list.h"
#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"

namespace penstock::internal::cli {

// Computes outputs (outputs_by_name) and, with `backward`, the gradients of the mean of the microbatches' losses
// ("grad.NAME"). With process ranks, each rank is this command again, with the same arguments: it reaches run() too,
// runs its stages, writes its results and exits there. Throws PipelineError or, with process ranks, std::runtime_error
// with the message of the first rank that failed.
class Pipelined {
 public:
  // Results are on the CPU, whatever `devices` the ranks compute on.
  Pipelined(const Pipe& pipe, const Schedule& schedule, const RunOptions& options, const DeviceList& devices,
            bool backward);
  ~Pipelined();
  Pipelined(const Pipelined&) = delete;
  Pipelined& operator=(const Pipelined&) = delete;

  // Starts process ranks, which run while this process does other work. Does nothing with thread ranks.
  void start();
  TensorsByName run(const TensorsByName& batch);
  // Returns the time that the slowest rank took for the batch.
  double seconds() const { return seconds_; }

 private:
  TensorsByName run_here(const TensorsByName& batch, std::shared_ptr<Transport> transport);
  // Replaces tensors on devices by copies in CPU memory. Throws std::runtime_error at the timeout.
  void copy_to_host(TensorsByName& tensors, const char* what) const;

  const Pipe& pipe_;
  const Schedule& schedule_;
  const RunOptions& options_;
  const DeviceList& devices_;
  bool backward_;
  double seconds_ = 0;
  std::unique_ptr<LocalRanks> processes_;
};

}  // namespace penstock::internal::cli
