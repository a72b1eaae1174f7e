// Lets the listening sockets of a library accept connections only while ranks connect. Connections that have been
// accepted are not affected.
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

#include "penstock/base/mutex.h"

namespace penstock::internal {

// Thread-safe. On systems without socket filters, the sockets stay open.
class ConnectionFilter {
 public:
  // Takes the listening sockets as inodes by descriptor, and refuses connections from now on. A descriptor whose number
  // is reused for another file is ignored. The filter stays in force after the destructor.
  explicit ConnectionFilter(std::map<int, ino_t> listening);
  ConnectionFilter(const ConnectionFilter&) = delete;
  ConnectionFilter& operator=(const ConnectionFilter&) = delete;

  // Accepts connections for as long as it lives. The filter must outlive it.
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
  void change(int openings) PENSTOCK_EXCLUDES(mutex_);
  void apply(bool is_open) const;

  // A leaf lock, held while the filters are changed.
  Mutex mutex_;
  // Number of Opening objects.
  int openings_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  const std::map<int, ino_t> listening_;
};

}  // namespace penstock::internal
