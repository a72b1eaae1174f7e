#include "penstock/runtime/agreement.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/runtime/digest.h"
#include "penstock/runtime/error.h"
#include "penstock/schedule/csv.h"

namespace penstock::internal {
namespace {

at::Tensor receive_from(Transport& transport, int rank, Tag tag, Deadline deadline) {
  transport.post_receive(rank, tag);
  return transport.receive(rank, tag, deadline).at(0);
}

// Returns the rows of all processes, by rank. Rank 0 collects them and sends them to the others.
at::Tensor gather(Transport& transport, const at::Tensor& row, std::uint32_t round, Deadline deadline) {
  const Tag tag{.channel = 0, .number = round};
  at::Tensor all = row.unsqueeze(0).repeat({transport.ranks(), 1});
  if (transport.rank() == 0) {
    for (int rank = 1; rank < transport.ranks(); ++rank) all[rank] = receive_from(transport, rank, tag, deadline)[rank];
    for (int rank = 1; rank < transport.ranks(); ++rank) transport.send(rank, tag, {all}, deadline);
    return all;
  }
  transport.send(0, tag, {all}, deadline);
  return receive_from(transport, 0, tag, deadline);
}

// A device as a number: 0 for the CPU and for a stage of another process.
constexpr std::int64_t kMostIndices = 1024;
std::int64_t number_of(at::Device device) {
  return static_cast<std::int64_t>(device.type()) * kMostIndices +
         std::max<std::int64_t>(with_index(device).index(), 0);
}
at::Device device_of(std::int64_t number) {
  const auto type = static_cast<at::DeviceType>(number / kMostIndices);
  if (type == at::kCPU) return at::kCPU;
  return {type, static_cast<at::DeviceIndex>(number % kMostIndices)};
}

at::Tensor row_of(const Agreement& own) {
  at::Tensor row = at::zeros({1 + own.stages}, at::kLong);
  row[0] = own.has_loss ? 1 : 0;
  for (const auto& [stage, device] : own.devices) row[1 + stage] = number_of(device);
  return row;
}

Agreed agreed_in(const at::Tensor& rows) {
  Agreed agreed;
  const auto all = rows.accessor<std::int64_t, 2>();
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) {
    agreed.has_loss = agreed.has_loss || all[rank][0] != 0;
    std::vector<at::Device>& devices = agreed.devices.emplace_back();
    for (std::int64_t stage = 1; stage < all.size(1); ++stage) devices.push_back(device_of(all[rank][stage]));
  }
  return agreed;
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

Agreed require_agreement(Transport& transport, const Agreement& own, Deadline deadline) {
  // The order of another pipeline does not have these messages.
  transport.set_order(nullptr);
  transport.begin_step(own.digest);
  const at::Tensor all =
      gather(transport, at::full({1}, static_cast<std::int64_t>(own.digest), at::kLong), /*round=*/0, deadline);
  int other = 1;
  while (other < transport.ranks() && all[other].item<std::int64_t>() == all[0].item<std::int64_t>()) ++other;
  const bool agree = other == transport.ranks();
  Agreed agreed;
  // No process returns before all have compared the digests: a slow one would otherwise fail with the connection lost
  // by one that has already thrown.
  try {
    // Processes that disagree may have different numbers of stages.
    agreed = agreed_in(gather(transport, row_of(agree ? own : Agreement()), /*round=*/1, deadline));
    transport.end_step(deadline);
  } catch (const TransportError&) {
    if (agree) throw;
  }
  if (agree) return agreed;
  throw PipelineError(concat(
      "process ", other,
      " has another pipeline than process 0: the schedule, the wiring, the shared parameters, whether parameters are "
      "sharded and whether there is a loss_weight should be the same in all processes.\n"
      "  Hint: pass the same wiring and shared parameters to StagedModel in all processes."));
}

}  // namespace penstock::internal
