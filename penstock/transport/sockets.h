// The few things that we do with sockets ourselves: everything else is c10d's.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "penstock/base/deadline.h"

namespace penstock::internal {

inline constexpr const char* kLoopback = "127.0.0.1";

// What the system says of an errno.
std::string system_reason(int error);

// A file descriptor that is closed when this ends.
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

// A socket that listens on this address alone, which is not inherited by programs that are started. Port 0 is any that
// is free. Throws std::runtime_error with the system's reason.
Descriptor listen_on(const std::string& address, int port);
int port_of(const Descriptor& socket);
// Returns the port of the own end of a TCP socket; none for anything else.
std::optional<int> own_port(int socket);

// Throws std::runtime_error unless this process may open so many more descriptors.
void require_descriptors(int count);

// What came back for a question, and why it is not more.
struct Answer {
  std::string bytes;
  // Somebody listened there.
  bool connected = false;
  // What the last attempt failed with.
  std::string why;
};
// Connects, sends the question and waits for `size` bytes. Tries again until the deadline while nobody listens there, or
// the connection is closed without an answer; any answer ends it. Calls `on_waiting` with the reason between attempts and
// while it waits.
Answer ask(const std::string& address, int port, const std::string& question, std::size_t size, Deadline deadline,
           const std::function<void(const std::string& why)>& on_waiting);

// This machine's address on the way there; empty when there is no way.
std::string address_towards(const std::string& address, int port);

}  // namespace penstock::internal
