#include "penstock/transport/c10d.h"

#include <string>
#include <utility>

#include "penstock/transport/block_pool.h"
#include "penstock/transport/c10d_transport.h"
#include "penstock/transport/child_sockets.h"
#include "penstock/transport/connection_filter.h"
#include "penstock/transport/nccl_interface.h"

namespace penstock {

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options) {
  return internal::c10d_transport_with_pool(store, rank, ranks, std::move(options), internal::BlockPool::make());
}

std::unique_ptr<Transport> c10d_transport(const Rendezvous& rendezvous, C10dOptions options) {
  if (!options.timeout) options.timeout = rendezvous.timeout;
  if (!options.on_waiting) options.on_waiting = rendezvous.on_waiting;
  if (options.job_token.empty()) options.job_token = rendezvous.job_token;
  if (!options.backends) {
    options.backends =
        gloo_backends({.interface = rendezvous.interface, .address = rendezvous.address, .timeout = *options.timeout});
  }
  options.on_device_transport = [&rendezvous, call = std::move(options.on_device_transport)](
                                    DeviceTransport chosen, const std::string& reason) {
    if (chosen == DeviceTransport::Direct) internal::restrict_nccl(rendezvous.interface, rendezvous.address);
    if (call) call(chosen, reason);
  };
  auto transport = c10d_transport(rendezvous.store, rendezvous.rank, rendezvous.ranks, std::move(options));
  // All ranks have connected to the store, so its port takes no more connections.
  if (rendezvous.served_port != 0) {
    internal::close_port_in_children(rendezvous.served_port);
    const internal::ConnectionFilter refused(internal::sockets_listening_on(rendezvous.served_port));
  }
  return transport;
}

}  // namespace penstock
