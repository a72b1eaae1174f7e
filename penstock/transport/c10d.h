// The transport of process ranks, on one machine or several. Tensors are sent through c10d::Backends: Gloo's, unless
// you pass others.
//
//   std::unique_ptr<Transport> transport = c10d_transport(rendezvous());
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/device_backend_factory.h"
#include "penstock/transport/gloo.h"
#include "penstock/transport/rendezvous.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct C10dOptions {
  // Creates the backends of the transport and of each group. If empty, Gloo on loopback or on the address of the
  // rendezvous.
  BackendFactory backends = {};
  // Creates backends for tensors on devices, which are then sent from device to device. Either all ranks have one, or
  // none. If empty, device tensors are copied to CPU memory and sent from there.
  //
  // A rank whose stages lie on several devices has connections for each pair of them, and its groups reduce device
  // tensors in CPU memory. If a message from device to device does not arrive, the streams of this rank continue with
  // undefined values and later calls throw: a step that has returned may have failed until the next one succeeds.
  DeviceBackendFactory device_backends = {};
  // Time that the ranks have to connect: those of the transport and, with Gloo, those of each group. If not set, the
  // timeout of the rendezvous, or 60 s.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  // Secret of the job. Processes that do not know it are refused. If empty, that of the rendezvous.
  std::string job_token = {};
  // Options that must be the same on all ranks, as text by name. Ranks compare them when they connect, and all of them
  // throw if one differs from rank 0.
  std::map<std::string, std::string> agreed = {};
  // Receives a line of text from time to time while ranks are missing. If empty, that of the rendezvous.
  WaitingFunction on_waiting = {};
  // Sends shapes with every message. By default they are cached: see Transport::begin_step.
  bool dynamic_shapes = false;
};

// Returns the transport of one rank. Blocks until all ranks have connected. A rank may create several transports, one
// after the other, if all ranks do. Throws TransportError if ranks are missing at the timeout (Timeout), or if they
// differ in their token or options (Aborted).
//
// One thread uses the transport at a time, except where Transport says otherwise. It owns threads, which its destructor
// joins: one that transfers data, one for each peer that receives its control message, one for deadlines, one that
// frees completed sends, and one for the collectives of each group. With tensors on devices there are one that starts
// sends when the devices have computed them, or, with device_backends, one that watches operations in flight. If the process exits while a transport is alive, it
// leaves as if it were destroyed.
std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options = {});
// Takes rank, store and defaults of the options from the rendezvous.
std::unique_ptr<Transport> c10d_transport(const Rendezvous& rendezvous, C10dOptions options = {});

}  // namespace penstock
