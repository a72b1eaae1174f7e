// Links between ranks and the messages on them, as the simulator models them (simulate.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/schedule/simulate/sampler.h"

namespace penstock::internal {

// Activations travel an edge of the stage graph forward, gradients backward.
enum class Direction : std::uint8_t { Forward, Backward };

class Network {
 public:
  // Refers to the schedule and the sampler, which must outlive it.
  Network(const Schedule& schedule, const Costs& costs, CostSampler& sampler);

  // Returns true if the ends of an edge are on different ranks. All other members are for such edges only.
  bool crosses_ranks(Direction direction, int edge) const { return channel(direction, edge).crosses_ranks; }
  int receiver_rank(Direction direction, int edge) const { return channel(direction, edge).receiver_rank; }

  // Draw the time that a rank is busy with a send, with posting a receive, or with a message that has arrived.
  double draw_send(Direction direction, int edge) {
    Channel& link = channel(direction, edge);
    return sampler_.draw(link.decks, &LinkDecks::send, link.costs.send);
  }
  double draw_post(Direction direction, int edge) {
    Channel& link = channel(direction, edge);
    return sampler_.draw(link.decks, &LinkDecks::post, link.costs.post);
  }
  double draw_receive(Direction direction, int edge) {
    Channel& link = channel(direction, edge);
    return sampler_.draw(link.decks, &LinkDecks::receive, link.costs.receive);
  }

  bool has_arrived(Direction direction, int edge, int microbatch) const {
    return message(direction, edge, microbatch).state == Message::State::Arrived;
  }
  double arrival_time(Direction direction, int edge, int microbatch) const {
    return message(direction, edge, microbatch).time;
  }

  // Sends a message. Returns true if it arrives now that it has been sent, because its receive was posted before.
  bool send(Direction direction, int edge, int microbatch, double time) {
    Channel& link = channel(direction, edge);
    double& free = link_free_[link.link];
    const double leaves = std::max(time, free);
    free = leaves + link.transfer_time;
    Message& sent = message(direction, edge, microbatch);
    if (sent.state != Message::State::Posted) {
      sent = {leaves, Message::State::Sent};
      return false;
    }
    sent = {std::max(leaves, sent.time) + draw_transit(link), Message::State::Arrived};
    return true;
  }

  // Posts the receive of a message, which arrives if it has been sent before.
  void post(Direction direction, int edge, int microbatch, double time) {
    Message& posted = message(direction, edge, microbatch);
    if (posted.state == Message::State::Sent) {
      posted = {std::max(posted.time, time) + draw_transit(channel(direction, edge)), Message::State::Arrived};
    } else if (posted.state == Message::State::Unknown) {
      posted = {time, Message::State::Posted};
    }
  }

 private:
  struct Message {
    enum class State : std::uint8_t { Unknown, Sent, Posted, Arrived };
    // Time at which it entered the link if sent, of its receive if posted, and of its arrival if arrived.
    double time = 0;
    State state = State::Unknown;
  };

  // An edge in one direction.
  struct Channel {
    int receiver_rank = 0;
    // Index into link_free_; edges between the same ranks share a link.
    std::size_t link = 0;
    LinkCosts costs;
    // Samples of the link, or null.
    LinkDecks* decks = nullptr;
    // Time that a message occupies the link: bytes ÷ bandwidth.
    double transfer_time = 0;
    bool crosses_ranks = false;
  };

  Channel& channel(Direction direction, int edge) {
    return channels_[static_cast<std::size_t>(direction)][static_cast<std::size_t>(edge)];
  }
  const Channel& channel(Direction direction, int edge) const {
    return channels_[static_cast<std::size_t>(direction)][static_cast<std::size_t>(edge)];
  }
  std::size_t message_index(int edge, int microbatch) const {
    return static_cast<std::size_t>(edge) * microbatches_ + static_cast<std::size_t>(microbatch);
  }
  Message& message(Direction direction, int edge, int microbatch) {
    return messages_[static_cast<std::size_t>(direction)][message_index(edge, microbatch)];
  }
  const Message& message(Direction direction, int edge, int microbatch) const {
    return messages_[static_cast<std::size_t>(direction)][message_index(edge, microbatch)];
  }

  double draw_transit(Channel& link) {
    return link.transfer_time + sampler_.draw(link.decks, &LinkDecks::latency, link.costs.latency);
  }

  CostSampler& sampler_;
  std::size_t microbatches_;
  // Channels by direction and edge; messages by direction, edge and microbatch.
  std::array<std::vector<Channel>, 2> channels_;
  std::array<std::vector<Message>, 2> messages_;
  // Time from which each link is free.
  std::vector<double> link_free_;
};

}  // namespace penstock::internal
