// The transport of process ranks, on one machine or several. Tensors are sent through c10d::Backends: Gloo's, unless
// you pass others.
//
//   std::unique_ptr<Transport> transport = c10d_transport(rendezvous());
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/device_backend.h"
#include "penstock/transport/gloo.h"
#include "penstock/transport/rendezvous.h"
#include "penstock/transport/transport.h"

namespace penstock {

// Receives how the ranks send tensors on devices, Direct or Staged, and why Auto has not chosen Direct.
using DeviceTransportFunction = std::function<void(DeviceTransport chosen, const std::string& reason)>;

struct C10dOptions {
  // Creates the backends of the transport and of each group. If empty, Gloo on loopback or on the address of the
  // rendezvous.
  BackendFactory backends = {};
  // Backends for tensors on devices, from device_backends(). If empty, this rank cannot send them from device to
  // device, and none does.
  DeviceBackends device_backends = {};
  // Selects how tensors on devices are sent, alike on all ranks: they compare what is possible on each when they
  // connect. If Direct is asked for and impossible, all of them throw, with the reason.
  //
  // A rank whose stages lie on several devices has connections for each pair of them, and its groups reduce device
  // tensors in CPU memory. If a message from device to device does not arrive, the streams of this rank continue with
  // undefined values and later calls throw: a step that has returned may have failed until the next one succeeds.
  DeviceTransport device_transport = DeviceTransport::Auto;
  // Time that the ranks have to connect: those of the transport and, with Gloo, those of each group. If not set, the
  // timeout of the rendezvous, or 60 s.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  // Secret of the job. Processes that do not know it are refused. If empty, that of the rendezvous.
  std::string job_token = {};
  // Options that must be the same on all ranks, as text by name. Ranks compare them when they connect, and all of them
  // throw if one differs from rank 0.
  std::map<std::string, std::string> agreed = {};
  // Called when the ranks have connected.
  DeviceTransportFunction on_device_transport = {};
  // Receives a line of text from time to time while ranks are missing. If empty, that of the rendezvous.
  WaitingFunction on_waiting = {};
  // Sends shapes with every message. By default they are cached: see Transport::begin_step.
  bool dynamic_shapes = false;
};

// Returns the transport of one rank. Blocks until all ranks have connected. A rank may create several transports, one
// after the other, if all ranks do. Throws TransportError if ranks are missing at the timeout (Timeout), or if they
// differ in their token or options, or cannot send tensors from device to device as they are asked to (Aborted).
//
// One thread uses the transport at a time, except where Transport says otherwise. It owns threads, which its destructor
// joins: one that transfers data, one for each peer that receives its control message, one for deadlines, one that
// frees completed sends, and one for the collectives of each group. With tensors on devices there are one that starts
// sends when the devices have computed them, or, if they are sent from device to device, one that watches operations in
// flight. If the process exits while a transport is alive, it leaves as if it were destroyed.
std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options = {});
// Takes rank, store and defaults of the options from the rendezvous. If tensors are sent from device to device, sets
// NCCL_SOCKET_IFNAME to the interface of the rendezvous, unless it is set: by default, NCCL listens on others.
std::unique_ptr<Transport> c10d_transport(const Rendezvous& rendezvous, C10dOptions options = {});

}  // namespace penstock
