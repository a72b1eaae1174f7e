// The order of the messages of a step, for transports whose messages have no tags on the wire.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <vector>

namespace penstock {

// Identifies a message between two ranks: the channel that it is sent through, and its number in the channel. Process
// ranks accept both up to 32767, thread ranks up to 16777215; they throw std::invalid_argument for larger ones.
struct Tag {
  std::uint32_t channel = 0;
  std::uint32_t number = 0;
  friend bool operator==(const Tag&, const Tag&) = default;
};

// The messages that one rank sends and receives in a step, each once, in the order in which their senders send them.
struct MessageOrder {
  struct Entry {
    Tag tag;
    // Devices of the stages at both ends, with their indices. All messages of a channel have the same two.
    at::Device from = at::kCPU;
    at::Device to = at::kCPU;
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  // Messages by receiver.
  std::map<int, std::vector<Entry>> sent;
  // Messages by sender.
  std::map<int, std::vector<Entry>> received;
};

}  // namespace penstock
