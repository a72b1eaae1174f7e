#include "penstock/transport/connection_filter.h"

#include <linux/filter.h>
#include <sys/socket.h>

#include <utility>

#include "penstock/transport/child_sockets.h"

namespace penstock::internal {
namespace {

// Makes the kernel drop every packet to this socket. A listening socket receives the requests to connect; the
// connections that it has accepted are sockets of their own.
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

ConnectionFilter::ConnectionFilter(std::map<int, ino_t> listening) : listening_(std::move(listening)) {
  apply(/*is_open=*/false);
}

void ConnectionFilter::apply(bool is_open) const {
  for (const auto& [descriptor, inode] : listening_) {
    if (inode_of_socket(descriptor) != inode) continue;
    is_open ? drop_none(descriptor) : drop_all(descriptor);
  }
}

void ConnectionFilter::change(int openings) {
  const MutexLock lock(mutex_);
  const bool was_open = openings_ > 0;
  openings_ += openings;
  const bool is_open = openings_ > 0;
  if (was_open != is_open) apply(is_open);
}

}  // namespace penstock::internal
