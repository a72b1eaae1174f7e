// Ranks that are processes, on one machine or several: tensors travel through c10d::Backends, Gloo's unless others are
// given.
//
//   const Rendezvous place = rendezvous();
//   std::unique_ptr<Transport> transport = c10d_transport(place);
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/block_pool.h"
#include "penstock/transport/gloo.h"
#include "penstock/transport/membership.h"
#include "penstock/transport/rendezvous.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct C10dOptions {
  // Gloo on loopback when there is none.
  BackendFactory backends = {};
  // Time that the ranks have to connect: those of the transport and, with Gloo, those of each group. If left out, it is the
  // timeout of the rendezvous, or 60 s.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  // The secret of the job, which a process has to know to be a rank of it. If left out, it is that of the rendezvous.
  JobToken token = JobToken();
  // Options that must be the same on all ranks. Ranks compare them when they connect, and all of them throw when one
  // differs from rank 0.
  RankOptions agreed = {};
  // Receives a line from time to time while ranks are missing. If left out, it is that of the rendezvous.
  WaitingFunction on_waiting = {};
  // Every message tells its shapes. Without, they are learnt: see Transport::begin_step.
  bool dynamic_shapes = false;
  // For what is received; one of its own when there is none.
  std::shared_ptr<BlockPool> pool = {};
};

// One rank's end; a rank may make several, one after the other, when all do. Blocks until all ranks have connected. Throws
// TransportError when they have not within the timeout, or do not agree (membership.h). One thread uses it at a time,
// except for abort. When the process exits while a transport is alive, the transport leaves as if it were destroyed. Threads of its own: one that moves data, one for each other rank that waits for its last word, one for
// deadlines, one that frees what was sent, and one for the collectives of each group.
std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options = {});
// With Gloo on the address of the rendezvous, unless other backends are given.
std::unique_ptr<Transport> c10d_transport(const Rendezvous& place, C10dOptions options = {});

}  // namespace penstock
