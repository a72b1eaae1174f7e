// A batch through a pipeline, on threads or on processes.
#pragma once

#include <string>

#include "penstock/cli/program/options.h"
#include "penstock/cli/program/own_ranks.h"
#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"

namespace penstock::cli {

// Outputs (outputs_by_name), and with `backward` the gradients of the mean of the microbatches' losses, "grad.NAME". When ranks are
// processes, this one starts them as itself with the same words, and each of them comes here too: it does its part and
// ends. Throws PipelineError and what else goes wrong; of processes, what the first of them said.
class Pipelined {
 public:
  Pipelined(const Pipe& pipe, const Schedule& schedule, const RunOptions& options, bool backward);
  ~Pipelined();
  Pipelined(const Pipelined&) = delete;
  Pipelined& operator=(const Pipelined&) = delete;

  // Starts processes, if that is what ranks are: they work while this process does something else.
  void start();
  TensorsByName run(const TensorsByName& batch);
  // Returns how long the pipeline took for the batch, on the rank that took longest.
  double seconds() const { return seconds_; }

 private:
  TensorsByName run_here(const TensorsByName& batch, std::shared_ptr<Transport> transport);

  const Pipe& pipe_;
  const Schedule& schedule_;
  const RunOptions& options_;
  bool backward_;
  double seconds_ = 0;
  std::unique_ptr<OwnRanks> processes_;
};

}  // namespace penstock::cli
