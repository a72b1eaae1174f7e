// Keeps this process's connections out of the processes that it forks. A child that inherits a socket keeps the
// connection open when its parent dies, so that the other ranks would not detect the death before the timeout.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>

namespace penstock::internal {

// Closes the socket in children: with close-on-exec in programs that are started, and in a forked child at once. In a
// forked child /dev/null takes the descriptor's number, as code there may still close it. Thread-safe.
void close_in_children(int socket);

// Does so for all TCP sockets of this process with this local port: the listening one, and those that it has accepted.
void close_port_in_children(int port);

// Returns the inode of a socket; nullopt for other files.
std::optional<ino_t> inode_of_socket(int descriptor);

// Returns the TCP sockets of this process that listen on this port: inodes by descriptor.
std::map<int, ino_t> sockets_listening_on(int port);

// Finds the TCP sockets that a library opens. Sockets that other threads open at the same time are found too.
//
//   const NewSockets sockets;
//   connect_by_some_library();
//   sockets.close_in_children();
class NewSockets {
 public:
  NewSockets();
  void close_in_children() const;
  // Returns the new sockets that listen: inodes by descriptor.
  std::map<int, ino_t> listening() const;

 private:
  std::map<int, ino_t> found() const;

  // Inodes by descriptor: the number of a closed descriptor may be reused for another socket.
  std::map<int, ino_t> before_;
};

}  // namespace penstock::internal
