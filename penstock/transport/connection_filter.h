// Keeps strangers out of listening sockets that a library owns: they take connections only while ranks are expected.
// Connections that have been accepted stay as they are.
//
//   const NewSockets sockets;
//   auto device = listen_by_some_library();
//   ConnectionFilter filter(sockets.listening());
//   {
//     const ConnectionFilter::Opening opening(filter);
//     wait_until_all_ranks_have_connected();
//   }
#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>

namespace penstock::internal {

// Thread-safe. Where the system has no socket filters, the sockets stay open.
class ConnectionFilter {
 public:
  // Takes the inodes of listening sockets by their descriptors, and refuses connections from now on. A descriptor that is
  // given to another file later is left alone.
  explicit ConnectionFilter(std::map<int, ino_t> listening);
  ConnectionFilter(const ConnectionFilter&) = delete;
  ConnectionFilter& operator=(const ConnectionFilter&) = delete;

  // Connections are taken as long as an object of this class lives.
  class Opening {
   public:
    explicit Opening(ConnectionFilter& filter) : filter_(filter) { filter_.change(+1); }
    ~Opening() { filter_.change(-1); }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

   private:
    ConnectionFilter& filter_;
  };

 private:
  void change(int openings);
  void apply(bool is_open) const;

  std::mutex mutex_;
  int openings_ = 0;
  std::map<int, ino_t> listening_;
};

}  // namespace penstock::internal
