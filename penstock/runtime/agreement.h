// Checks at construction that all process ranks run the same pipeline.
#pragma once

#include <cstdint>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Returns a digest of everything that all processes have to agree on.
std::uint64_t agreement_digest(const Schedule& lowered_schedule, const StagedModel& model,
                               const PipelineOptions& options);

// Compares the digests of all processes, and returns true if `has_loss` is true on any of them. Throws PipelineError,
// on every process, if one differs, and TransportError if a process does not take part by the deadline.
bool require_agreement(Transport& transport, std::uint64_t digest, bool has_loss, Deadline deadline);

}  // namespace penstock::internal
