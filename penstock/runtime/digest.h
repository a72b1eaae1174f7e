// A 64-bit digest, to compare what ranks have without sending it. It is the same in every process.
#pragma once

#include <cstdint>
#include <string_view>

namespace penstock::internal {

class Digest {
 public:
  Digest& add(std::string_view text) {
    for (const char byte : text) mix(static_cast<std::uint8_t>(byte));
    return add(static_cast<std::int64_t>(text.size()));
  }
  Digest& add(std::int64_t number) {
    for (unsigned shift = 0; shift < 64; shift += 8) {
      mix(static_cast<std::uint8_t>(static_cast<std::uint64_t>(number) >> shift));
    }
    return *this;
  }
  std::uint64_t value() const { return value_; }

 private:
  // FNV-1a.
  void mix(std::uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3U; }

  std::uint64_t value_ = 0xcbf29ce484222325U;
};

}  // namespace penstock::internal
