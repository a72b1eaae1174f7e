#include "penstock/transport/sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

constexpr int kBacklog = 1024;
constexpr Clock::duration kRetryInterval = std::chrono::milliseconds(20);
constexpr Clock::duration kPollInterval = std::chrono::milliseconds(50);
constexpr Clock::duration kConnectTimeout = std::chrono::seconds(2);

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Returns the addresses of a host name. If there are none, sets `why`.
Addresses resolve(const std::string& address, int port, int kind, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = kind;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (failed != 0) why = failed == EAI_SYSTEM ? system_reason(errno) : gai_strerror(failed);
  return Addresses(failed == 0 ? found : nullptr);
}

Descriptor socket_for(const addrinfo& address) {
  return Descriptor(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

std::chrono::milliseconds until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::clamp(left, std::chrono::milliseconds(0), std::chrono::milliseconds(1'000'000));
}

using OnWaiting = std::function<void(const std::string& why)>;

// Returns why no connection can be made, or an empty text if there is one. Gives up after kConnectTimeout, so that
// other addresses of the same name are tried before the deadline.
std::string try_to_connect(const Descriptor& socket, const addrinfo& address, Deadline deadline,
                           const OnWaiting& on_waiting) {
  if (!socket.is_open()) return system_reason(errno);
  if (::connect(socket.number(), address.ai_addr, address.ai_addrlen) == 0) return "";
  if (errno != EINPROGRESS) return system_reason(errno);
  const Deadline end = std::min<Deadline>(deadline, Clock::now() + kConnectTimeout);
  pollfd waiting{.fd = socket.number(), .events = POLLOUT, .revents = 0};
  for (;;) {
    const Deadline look = std::min<Deadline>(end, Clock::now() + kPollInterval);
    if (::poll(&waiting, 1, static_cast<int>(until(look).count())) > 0) break;
    if (Clock::now() >= end) return system_reason(ETIMEDOUT);
    on_waiting(system_reason(ETIMEDOUT));
  }
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? "" : system_reason(error);
}

// Reads up to `size` bytes into the answer.
void read_answer(const Descriptor& socket, std::size_t size, Deadline deadline, Answer& answer,
                 const OnWaiting& on_waiting) {
  std::array<char, 64> buffer{};
  while (answer.bytes.size() < size) {
    pollfd waiting{.fd = socket.number(), .events = POLLIN, .revents = 0};
    const Deadline look = std::min<Deadline>(deadline, Clock::now() + kPollInterval);
    if (::poll(&waiting, 1, static_cast<int>(until(look).count())) <= 0) {
      answer.why = "it accepts connections and does not answer";
      if (Clock::now() >= deadline) return;
      on_waiting(answer.why);
      continue;
    }
    const ssize_t count =
        ::recv(socket.number(), buffer.data(), std::min(size - answer.bytes.size(), buffer.size()), 0);
    if (count <= 0) {
      answer.why = count == 0 || errno == ECONNRESET ? "it closed the connection" : system_reason(errno);
      return;
    }
    answer.bytes.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

}  // namespace

std::string system_reason(int error) {
  return std::generic_category().message(error);
}

void Descriptor::reset(int number) {
  if (number_ >= 0) ::close(number_);
  number_ = number;
}

Descriptor listen_on(const std::string& address, int port) {
  std::string why;
  const Addresses addresses = resolve(address, port, SOCK_STREAM, why);
  for (const addrinfo* candidate = addresses.get(); candidate != nullptr; candidate = candidate->ai_next) {
    Descriptor socket = socket_for(*candidate);
    if (socket.is_open()) {
      // Allows a port whose last connections are in TIME_WAIT.
      const int yes = 1;
      ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (::bind(socket.number(), candidate->ai_addr, candidate->ai_addrlen) == 0 &&
          ::listen(socket.number(), kBacklog) == 0) {
        return socket;
      }
    }
    why = system_reason(errno);
  }
  throw std::runtime_error(why);
}

std::optional<int> local_port(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  return std::nullopt;
}

int port_of(const Descriptor& socket) {
  const std::optional<int> port = local_port(socket.number());
  if (!port) throw std::runtime_error(system_reason(errno));
  return *port;
}

void require_descriptors(int count) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  std::error_code error;
  std::int64_t open = 0;
  for (std::filesystem::directory_iterator next("/proc/self/fd", error), end; !error && next != end;
       next.increment(error)) {
    ++open;
  }
  const bool are_none_left =
      error == std::errc::too_many_files_open || error == std::errc::too_many_files_open_in_system;
  if (error && !are_none_left) return;
  // One of the descriptors belongs to the iterator.
  const std::int64_t left = are_none_left ? 0 : static_cast<std::int64_t>(limit.rlim_cur) - (open - 1);
  if (left >= count) return;
  throw std::runtime_error(concat("connections need ", count, " file descriptors, and of ", limit.rlim_cur,
                                  " this process has ", std::max<std::int64_t>(left, 0),
                                  " left.\n  Hint: `ulimit -n N` allows more."));
}

Answer ask(const std::string& address, int port, const std::string& request, std::size_t size, Deadline deadline,
           const std::function<void(const std::string& why)>& on_waiting) {
  Answer answer;
  for (;;) {
    const Addresses addresses = resolve(address, port, SOCK_STREAM, answer.why);
    for (const addrinfo* candidate = addresses.get(); candidate != nullptr; candidate = candidate->ai_next) {
      const Descriptor socket = socket_for(*candidate);
      answer.why = try_to_connect(socket, *candidate, deadline, on_waiting);
      if (!answer.why.empty()) continue;
      answer.connected = true;
      // A short request fits into the buffer of a new connection, so this does not block.
      ::send(socket.number(), request.data(), request.size(), MSG_NOSIGNAL);
      read_answer(socket, size, deadline, answer, on_waiting);
      if (!answer.bytes.empty()) return answer;
    }
    if (Clock::now() + kRetryInterval >= deadline) return answer;
    on_waiting(answer.why);
    std::this_thread::sleep_for(kRetryInterval);
  }
}

std::string address_towards(const std::string& address, int port) {
  std::string why;
  const Addresses addresses = resolve(address, port, SOCK_DGRAM, why);
  for (const addrinfo* candidate = addresses.get(); candidate != nullptr; candidate = candidate->ai_next) {
    // Nothing is sent: connecting a datagram socket only looks up the route.
    const Descriptor socket = socket_for(*candidate);
    sockaddr_storage local{};
    socklen_t size = sizeof local;
    if (!socket.is_open() || ::connect(socket.number(), candidate->ai_addr, candidate->ai_addrlen) != 0 ||
        ::getsockname(socket.number(), reinterpret_cast<sockaddr*>(&local), &size) != 0) {
      continue;
    }
    std::array<char, NI_MAXHOST> text{};
    if (::getnameinfo(reinterpret_cast<const sockaddr*>(&local), size, text.data(), text.size(), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  return "";
}

}  // namespace penstock::internal
