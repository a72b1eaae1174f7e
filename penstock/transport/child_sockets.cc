#include "penstock/transport/child_sockets.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/transport/sockets.h"

namespace penstock::internal {
namespace {

int option_of(int socket, int option) {
  int value = -1;
  socklen_t size = sizeof value;
  return ::getsockopt(socket, SOL_SOCKET, option, &value, &size) == 0 ? value : -1;
}

std::map<int, ino_t> tcp_sockets() {
  std::map<int, ino_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    const std::optional<ino_t> inode = inode_of_socket(descriptor);
    if (!inode || option_of(descriptor, SO_TYPE) != SOCK_STREAM) continue;
    const int domain = option_of(descriptor, SO_DOMAIN);
    if (domain == AF_INET || domain == AF_INET6) found[descriptor] = *inode;
  }
  return found;
}

bool listens(int socket) {
  return option_of(socket, SO_ACCEPTCONN) == 1;
}

// The sockets that a forked child closes. A fork waits while the list is changed.
class ChildSockets {
 public:
  static ChildSockets& the() {
    // Never destroyed, as a thread may fork at any time.
    static auto* const kSockets = new ChildSockets;
    return *kSockets;
  }

  void add(int descriptor, ino_t inode) PENSTOCK_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::erase_if(sockets_, [](const Socket& socket) { return inode_of_socket(socket.descriptor) != socket.inode; });
    sockets_.push_back({.descriptor = descriptor, .inode = inode});
  }

 private:
  struct Socket {
    int descriptor;
    ino_t inode;
  };

  ChildSockets() { ::pthread_atfork(lock_before_fork, unlock_in_parent, close_in_child); }

  // The lock spans the fork, which the analysis cannot see.
  static void lock_before_fork() PENSTOCK_NO_THREAD_SAFETY_ANALYSIS { the().mutex_.lock(); }
  static void unlock_in_parent() PENSTOCK_NO_THREAD_SAFETY_ANALYSIS { the().mutex_.unlock(); }
  static void close_in_child() PENSTOCK_NO_THREAD_SAFETY_ANALYSIS {
    the().replace_all();
    the().mutex_.unlock();
  }

  void replace_all() PENSTOCK_REQUIRES(mutex_) {
    if (sockets_.empty()) return;
    const int null_device = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const Socket& socket : sockets_) {
      // The number may have been reused for another file.
      if (inode_of_socket(socket.descriptor) != socket.inode) continue;
      if (null_device >= 0) {
        ::dup3(null_device, socket.descriptor, O_CLOEXEC);
      } else {
        ::close(socket.descriptor);
      }
    }
    if (null_device >= 0) ::close(null_device);
    sockets_.clear();
  }

  // A leaf lock, held across fork().
  Mutex mutex_;
  std::vector<Socket> sockets_ PENSTOCK_GUARDED_BY(mutex_);
};

void keep_from_children(int descriptor, ino_t inode) {
  const int flags = ::fcntl(descriptor, F_GETFD);
  if (flags < 0) return;
  ::fcntl(descriptor, F_SETFD, flags | FD_CLOEXEC);
  ChildSockets::the().add(descriptor, inode);
}

}  // namespace

std::optional<ino_t> inode_of_socket(int descriptor) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
  return status.st_ino;
}

void close_in_children(int socket) {
  if (const auto inode = inode_of_socket(socket)) keep_from_children(socket, *inode);
}

void close_port_in_children(int port) {
  for (const auto& [descriptor, inode] : tcp_sockets()) {
    if (local_port(descriptor) == port) keep_from_children(descriptor, inode);
  }
}

std::map<int, ino_t> sockets_listening_on(int port) {
  std::map<int, ino_t> found = tcp_sockets();
  std::erase_if(found,
                [port](const auto& socket) { return !listens(socket.first) || local_port(socket.first) != port; });
  return found;
}

NewSockets::NewSockets() : before_(tcp_sockets()) {}

std::map<int, ino_t> NewSockets::found() const {
  std::map<int, ino_t> now = tcp_sockets();
  std::erase_if(now, [this](const auto& socket) {
    const auto earlier = before_.find(socket.first);
    return earlier != before_.end() && earlier->second == socket.second;
  });
  return now;
}

void NewSockets::close_in_children() const {
  for (const auto& [descriptor, inode] : found()) keep_from_children(descriptor, inode);
}

std::map<int, ino_t> NewSockets::listening() const {
  std::map<int, ino_t> listening = found();
  std::erase_if(listening, [](const auto& socket) { return !listens(socket.first); });
  return listening;
}

}  // namespace penstock::internal
