#include "penstock/transport/host_receives.h"

#include "penstock/base/text.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {

HostReceive HostReceives::post(int from, Tag tag, MessageKind kind, const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors{bytes};
  try {
    const MutexLock lock(backends_.mutex);
    return {.bytes = bytes,
            .work = unprofiled([&] { return backends_.of(tag).recv(tensors, from, wire_tag(tag, kind)); })};
  } catch (const c10::Error& error) {
    control_.throw_connection_lost(from, error);
  } catch (const std::runtime_error& error) {
    control_.throw_connection_lost(from, error);
  }
}

void HostReceives::wait(HostReceive& receive, int from, Deadline deadline) {
  if (!receive.work) return;
  step_.waiting_for.store(from, std::memory_order_relaxed);
  control_.wait(*receive.work, deadline, from, concat("no message came from rank ", from));
  step_.waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
  completed_.push_back(std::move(receive.work));
}

Metas HostReceives::wait(HeaderReceive& header, int from, Tag tag, Deadline deadline) {
  wait(header.first, from, deadline);
  const std::size_t rest = rest_of_header(header.first.text());
  if (rest == 0) return decode_header(header.first.text(), {});
  if (!header.rest.bytes.defined()) header.rest = post(from, tag, MessageKind::FreshData, rest);
  wait(header.rest, from, deadline);
  return decode_header(header.first.text(), header.rest.text());
}

}  // namespace penstock::internal
