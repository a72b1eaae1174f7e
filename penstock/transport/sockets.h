// The few socket operations that c10d does not provide.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/deadline.h"

namespace penstock::internal {

inline constexpr const char* kLoopback = "127.0.0.1";

// Returns the system's message for an errno.
std::string system_reason(int error);

// Owns a file descriptor, and closes it in its destructor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.number_, -1));
    return *this;
  }

  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  int release() { return std::exchange(number_, -1); }
  void reset(int number = -1);

 private:
  int number_;
};

// Returns a socket that listens on this address only, and is closed on exec. Port 0 stands for any free port. Throws
// std::runtime_error with the system's reason.
Descriptor listen_on(const std::string& address, int port);
int port_of(const Descriptor& socket);
// Returns the local port of a TCP socket; nullopt for other descriptors.
std::optional<int> local_port(int socket);

// Throws std::runtime_error unless this process may open `count` more descriptors.
void require_descriptors(int count);

// The answer to a request, and why it is incomplete.
struct Answer {
  std::string bytes;
  // True if a program has accepted a connection.
  bool connected = false;
  // Why the last attempt failed.
  std::string why;
};
// Connects, sends the request and waits for an answer of `size` bytes. Tries again until the deadline while nothing
// listens there, or if the connection is closed without an answer. Calls `on_waiting` with the reason between attempts
// and while it waits.
Answer ask(const std::string& address, int port, const std::string& request, std::size_t size, Deadline deadline,
           const std::function<void(const std::string& why)>& on_waiting);

// Returns the local address of the route to this address; empty if there is no route.
std::string address_towards(const std::string& address, int port);

}  // namespace penstock::internal
