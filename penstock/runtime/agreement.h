// Checks at construction that all process ranks run the same pipeline.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>

#include "penstock/runtime/message_order.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Returns a digest of everything that all processes have to agree on.
std::uint64_t agreement_digest(const Schedule& lowered_schedule, const StagedModel& model,
                               const PipelineOptions& options);

// A process's part of the agreement.
struct Agreement {
  std::uint64_t digest = 0;
  bool has_loss = false;
  // Number of stages of the model, and the devices of those of this process.
  int stages = 0;
  std::map<int, at::Device> devices = {};
};

struct Agreed {
  // True if `has_loss` is true on any process.
  bool has_loss = false;
  StageDeviceTable devices = {};
};

// Compares the digests of all processes, and collects the rest. Throws PipelineError, on every process, if a digest
// differs, and TransportError if a process does not take part by the deadline.
Agreed require_agreement(Transport& transport, const Agreement& own, Deadline deadline);

}  // namespace penstock::internal
