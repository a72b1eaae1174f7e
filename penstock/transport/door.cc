#include "penstock/transport/door.h"

#include <linux/filter.h>
#include <sys/socket.h>

#include <utility>

namespace penstock {
namespace {

// The kernel drops every packet that comes to a socket with this filter. Of a listening socket, these are the requests to
// connect: what it has accepted before are sockets of their own.
void drop_all(int socket) {
  sock_filter drop{.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = 0};
  const sock_fprog filter{.len = 1, .filter = &drop};
  ::setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
}

void drop_none(int socket) {
  const int ignored = 0;
  ::setsockopt(socket, SOL_SOCKET, SO_DETACH_FILTER, &ignored, sizeof ignored);
}

}  // namespace

Door::Door(std::vector<int> listening) : listening_(std::move(listening)) {
  for (const int socket : listening_) drop_all(socket);
}

void Door::change(int openings) {
  const std::lock_guard lock(mutex_);
  const bool was_open = openings_ > 0;
  openings_ += openings;
  const bool is_open = openings_ > 0;
  if (was_open == is_open) return;
  for (const int socket : listening_) is_open ? drop_none(socket) : drop_all(socket);
}

}  // namespace penstock
