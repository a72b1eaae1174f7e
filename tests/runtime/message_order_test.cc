#include "penstock/runtime/message_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "penstock/runtime/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"

namespace penstock::internal::testing {
namespace {

// Two replicas, whose ranks have a GPU each.
StageDeviceTable one_device_for_each_rank(const Schedule& schedule) {
  StageDeviceTable devices;
  for (int rank = 0; rank < 2 * schedule.ranks(); ++rank) {
    devices.emplace_back(static_cast<std::size_t>(schedule.stages()),
                         at::Device(at::kCUDA, static_cast<at::DeviceIndex>(rank)));
  }
  return devices;
}

// Returns the tags that a rank receives from another one, in the order of its own receives.
std::vector<Tag> own_receives(const Schedule& schedule, int rank, int from) {
  std::vector<Tag> tags;
  for (const Action& action : schedule.actions(rank)) {
    if (!action.is_recv() || schedule.placement().rank_of(action.other_stage) != from) continue;
    const Edge edge = edge_under(action);
    tags.push_back(tag_of(action.carries_activation() ? Direction::Forward : Direction::Backward,
                          schedule.graph().edge_index(edge.from, edge.to), action.microbatch));
  }
  return tags;
}

TEST(MessageOrder, IsTheSameAtBothEndsOfEverySchedule) {
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 3, 4}) {
      const Schedule training = lower(generate(generator.name, {.ranks = ranks, .microbatches = 2 * ranks}));
      for (const Schedule& schedule : {training, drop_backwards(training), drop_reductions(training)}) {
        SCOPED_TRACE(std::string(generator.name) + ", " + std::to_string(ranks) + " ranks");
        const StageDeviceTable devices = one_device_for_each_rank(schedule);
        std::vector<MessageOrder> orders;
        for (int rank = ranks; rank < 2 * ranks; ++rank) {
          orders.push_back(message_order(schedule, /*first_rank=*/ranks, rank, devices));
        }
        for (int rank = 0; rank < ranks; ++rank) {
          const MessageOrder& order = orders[static_cast<std::size_t>(rank)];
          for (const auto& [peer, entries] : order.received) {
            EXPECT_EQ(entries, orders[static_cast<std::size_t>(peer - ranks)].sent.at(ranks + rank));
            for (const MessageOrder::Entry& entry : entries) {
              EXPECT_EQ(entry.from.index(), peer);
              EXPECT_EQ(entry.to.index(), ranks + rank);
            }
            std::vector<Tag> tags;
            for (const MessageOrder::Entry& entry : entries) tags.push_back(entry.tag);
            std::vector<Tag> own = own_receives(schedule, rank, peer - ranks);
            EXPECT_TRUE(std::ranges::is_permutation(tags, own));
          }
        }
      }
    }
  }
}

TEST(MessageOrder, RefusesAScheduleThatSendsAMessageTwice) {
  Schedule schedule(loop_placement(2, 1), 1);
  for (int i = 0; i < 2; ++i) schedule.add(0, message(0, Computation::SendForward, 0, 1));
  schedule.add(1, message(1, Computation::RecvForward, 0, 0));
  try {
    message_order(schedule, 0, 1, one_device_for_each_rank(schedule));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PipelineError& error) {
    EXPECT_EQ(std::string(error.what()),
              "rank 1 has fewer receives than sends of the activation of microbatch 0 between the stages 0 and 1.\n"
              "  Hint: the schedule should send and receive each message once.");
  }
}

TEST(MessageOrder, FindsTheActionsOfAMessage) {
  for (const Generator& generator : generators()) {
    const Schedule schedule = lower(generate(generator.name, {.ranks = 3, .microbatches = 4}));
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      const auto actions = schedule.actions(rank);
      for (std::size_t i = 0; i < actions.size(); ++i) {
        const Action& action = actions[i];
        if (!action.is_message()) continue;
        SCOPED_TRACE(std::string(generator.name) + ", rank " + std::to_string(rank) + ", " + to_string(action));
        const Edge edge = edge_under(action);
        const Tag tag = tag_of(action.carries_activation() ? Direction::Forward : Direction::Backward,
                               schedule.graph().edge_index(edge.from, edge.to), action.microbatch);
        if (action.is_send()) {
          EXPECT_EQ(position_of(schedule, rank, tag, /*is_receive=*/false), static_cast<int>(i));
          continue;
        }
        const int position = position_of(schedule, rank, tag, /*is_receive=*/true);
        ASSERT_GT(position, static_cast<int>(i));
        bool takes = false;
        for_each_part(actions[static_cast<std::size_t>(position)], [&](const Action& part) {
          takes = takes || (part.stage == action.stage && part.microbatch == action.microbatch &&
                            (action.carries_activation() ? is_forward(part) : makes_input_gradient(part)));
        });
        EXPECT_TRUE(takes) << to_string(actions[static_cast<std::size_t>(position)]);
        // The sender's position belongs to another rank.
        EXPECT_EQ(position_of(schedule, rank, tag, /*is_receive=*/false), -1);
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
