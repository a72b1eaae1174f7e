// Keeps strangers out of listening sockets that a library owns: they take connections only while ranks are expected.
// Connections that are there stay as they are.
//
//   const NewSockets sockets;
//   auto device = listen_by_some_library();
//   Door door(sockets.listening());
//   {
//     const Door::Opening opening(door);
//     wait_until_all_ranks_have_connected();
//   }
#pragma once

#include <mutex>
#include <vector>

namespace penstock {

// Thread-safe. Where the system cannot do it, the sockets stay open.
class Door {
 public:
  // Takes descriptors of sockets that outlive this, and closes the door.
  explicit Door(std::vector<int> listening);
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // Open as long as one of these is alive.
  class Opening {
   public:
    explicit Opening(Door& door) : door_(door) { door_.change(+1); }
    ~Opening() { door_.change(-1); }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

   private:
    Door& door_;
  };

 private:
  void change(int openings);

  std::mutex mutex_;
  int openings_ = 0;
  std::vector<int> listening_;
};

}  // namespace penstock
