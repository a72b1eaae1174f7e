// Keeps this process's connections out of the processes that it forks. A child that holds a copy of a socket keeps the
// connection open when its parent dies, so that no other rank notices the death before the timeout.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>

namespace penstock::internal {

// Closes the socket in children: by close-on-exec in programs that are started, and in a forked child at once. The number
// stays taken in a forked child, by /dev/null, as somebody there may still close it.
void close_in_children(int socket);

// Does so for all TCP sockets of this process whose own end is at this port: the listening one, and those that it accepted.
void close_port_in_children(int port);

// Returns the inode of a socket; none for another file.
std::optional<ino_t> inode_of_socket(int descriptor);

// Returns the TCP sockets of this process that listen on this port: inodes by descriptor.
std::map<int, ino_t> sockets_listening_on(int port);

// Finds the TCP sockets that a library opens. One that another thread opens at the same time is taken for one of them.
//
//   const NewSockets sockets;
//   connect_by_some_library();
//   sockets.close_in_children();
class NewSockets {
 public:
  NewSockets();
  void close_in_children() const;
  // Returns those that listen: inodes by descriptor.
  std::map<int, ino_t> listening() const;

 private:
  std::map<int, ino_t> found() const;

  // The inode of each socket, by descriptor: a number that is closed may be given to another socket.
  std::map<int, ino_t> before_;
};

}  // namespace penstock::internal
