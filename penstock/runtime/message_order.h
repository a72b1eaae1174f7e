// The messages between the ranks of a schedule, in the order in which they are sent. See Transport::set_order.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/stage/wiring.h"
#include "penstock/transport/message_order.h"

namespace penstock::internal {

// Returns the tag of the message that an edge of the schedule's graph carries for a microbatch.
Tag tag_of(Direction direction, int edge, int microbatch);

// Returns the position of the action of a rank of the schedule that sends the message with a tag, or that takes it as
// received; -1 if there is none.
int position_of(const Schedule& schedule, int rank, Tag tag, bool is_receive);

// Devices of the stages, by rank and stage. A rank has the devices of its own stages; the others are the CPU.
using StageDeviceTable = std::vector<std::vector<at::Device>>;

// Returns the messages of one rank of a replica whose ranks begin with `first_rank`. Both are numbered through all
// replicas. Throws PipelineError unless the rank receives each message that is sent to it, and no other, once.
MessageOrder message_order(const Schedule& schedule, int first_rank, int rank, const StageDeviceTable& devices);

}  // namespace penstock::internal
