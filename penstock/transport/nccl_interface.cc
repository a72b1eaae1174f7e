#include "penstock/transport/nccl_interface.h"

#include <c10/util/env.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

// Returns the numeric address of an interface; empty if it is not one of IP.
std::string address_of(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr) return "";
  const bool is_ipv4 = entry.ifa_addr->sa_family == AF_INET;
  if (!is_ipv4 && entry.ifa_addr->sa_family != AF_INET6) return "";
  const socklen_t size = is_ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(entry.ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

std::string interface_with(const std::string& address) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> entries(first, &::freeifaddrs);
  for (const ifaddrs* entry = entries.get(); entry != nullptr; entry = entry->ifa_next) {
    if (address_of(*entry) == address) return entry->ifa_name;
  }
  return "";
}

}  // namespace

std::string nccl_interface(const std::string& interface, const std::string& address) {
  const std::string name = interface.empty() ? interface_with(address) : interface;
  // Without the sign, NCCL takes each interface whose name begins so.
  return name.empty() ? "" : concat("=", name);
}

void restrict_nccl(const std::string& interface, const std::string& address) {
  constexpr const char* kVariable = "NCCL_SOCKET_IFNAME";
  if (c10::utils::has_env(kVariable)) return;
  if (const std::string value = nccl_interface(interface, address); !value.empty()) {
    c10::utils::set_env(kVariable, value.c_str());
  }
}

}  // namespace penstock::internal
