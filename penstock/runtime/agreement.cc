#include "penstock/runtime/agreement.h"

#include <ATen/ops/full.h>

#include <vector>

#include "penstock/base/text.h"
#include "penstock/runtime/digest.h"
#include "penstock/runtime/error.h"
#include "penstock/schedule/csv.h"

namespace penstock::internal {
namespace {

at::Tensor receive_from(Transport& transport, int rank, Tag tag, Deadline deadline) {
  transport.post_receive(rank, tag);
  return transport.receive(rank, tag, deadline).at(0);
}

// Returns the numbers of all processes, by rank. Rank 0 collects them and sends them to the others.
at::Tensor gather(Transport& transport, std::int64_t number, std::uint32_t round, Deadline deadline) {
  const Tag tag{.channel = 0, .number = round};
  at::Tensor all = at::full({transport.ranks()}, number, at::kLong);
  if (transport.rank() == 0) {
    for (int rank = 1; rank < transport.ranks(); ++rank) all[rank] = receive_from(transport, rank, tag, deadline)[rank];
    for (int rank = 1; rank < transport.ranks(); ++rank) transport.send(rank, tag, {all}, deadline);
    return all;
  }
  transport.send(0, tag, {all}, deadline);
  return receive_from(transport, 0, tag, deadline);
}

}  // namespace

std::uint64_t agreement_digest(const Schedule& lowered_schedule, const StagedModel& model,
                               const PipelineOptions& options) {
  Digest digest;
  digest.add(to_csv(lowered_schedule)).add(options.sharded ? 1 : 0).add(options.loss_weight ? 1 : 0);
  digest.add(static_cast<std::int64_t>(model.wiring().links().size()));
  for (const Wiring::Link& link : model.wiring().links()) {
    digest.add(link.from).add(link.to).add(link.values ? static_cast<std::int64_t>(link.values->size()) : -1);
    if (!link.values) continue;
    for (const StageOutput& value : *link.values) digest.add(value.stage).add(value.output);
  }
  for (const std::vector<SharedParameter>& places : model.shared_parameters()) {
    digest.add(static_cast<std::int64_t>(places.size()));
    for (const SharedParameter& place : places) digest.add(place.stage).add(place.name);
  }
  return digest.value();
}

bool require_agreement(Transport& transport, std::uint64_t digest, bool has_loss, Deadline deadline) {
  transport.begin_step(digest);
  const at::Tensor all = gather(transport, static_cast<std::int64_t>(digest), /*round=*/0, deadline);
  int other = 1;
  while (other < transport.ranks() && all[other].item<std::int64_t>() == all[0].item<std::int64_t>()) ++other;
  const bool agree = other == transport.ranks();
  bool any_has_loss = has_loss;
  // No process returns before all have compared the digests: a slow one would otherwise fail with the connection lost
  // by one that has already thrown.
  try {
    any_has_loss = gather(transport, has_loss ? 1 : 0, /*round=*/1, deadline).any().item<bool>();
    transport.end_step(deadline);
  } catch (const TransportError&) {
    if (agree) throw;
  }
  if (agree) return any_has_loss;
  throw PipelineError(concat(
      "process ", other,
      " has another pipeline than process 0: the schedule, the wiring, the shared parameters, whether parameters are "
      "sharded and whether there is a loss_weight should be the same in all processes.\n"
      "  Hint: pass the same wiring and shared parameters to StagedModel in all processes."));
}

}  // namespace penstock::internal
