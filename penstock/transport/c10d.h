// Ranks that are processes, on one machine or several: tensors travel through c10d::Backends, Gloo's unless others are
// given.
//
//   const Rendezvous place = rendezvous();
//   std::unique_ptr<Transport> transport = c10d_transport(place);
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/gloo.h"
#include "penstock/transport/pool.h"
#include "penstock/transport/rendezvous.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct C10dOptions {
  // Gloo on loopback when there is none.
  BackendFactory backends = {};
  // Every message tells its shapes. Without, they are learnt: see Transport::begin_step.
  bool dynamic_shapes = false;
  // For what is received; one of its own when there is none.
  std::shared_ptr<BlockPool> pool = {};
};

// One rank's end; a rank may make several, one after the other, when all do. Returns when all ranks have come; throws
// TransportError when they have not within the time that the factory gives them. One thread uses it at a time, except for
// abort. Threads of its own: one that moves data, one for each other rank that waits for its last word, one for
// deadlines, one that frees what was sent, and one for the collectives of each group.
std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options = {});
// With Gloo on the address of the rendezvous, unless other backends are given.
std::unique_ptr<Transport> c10d_transport(const Rendezvous& place, C10dOptions options = {});

}  // namespace penstock
