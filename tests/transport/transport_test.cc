#include "penstock/transport/transport.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/tensor/values.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr Tag kActivation{.channel = 2, .number = 0};
constexpr Tag kGradient{.channel = 3, .number = 0};

class EveryWorld : public ::testing::TestWithParam<WorldCase> {
 protected:
  World world(const C10dOptions& options = {}) const { return {GetParam().carrier, GetParam().ranks, options}; }
};
INSTANTIATE_TEST_SUITE_P(Transport, EveryWorld, ::testing::ValuesIn(worlds(/*fewest_ranks=*/2)), case_name);

int next_of(const Transport& transport) {
  return (transport.rank() + 1) % transport.ranks();
}
int previous_of(const Transport& transport) {
  return (transport.rank() + transport.ranks() - 1) % transport.ranks();
}

// Sends a message to the next rank of a ring, and returns the one from the previous rank.
Message around(Transport& transport, Tag tag, const Message& message) {
  transport.post_receive(previous_of(transport), tag);
  transport.send(next_of(transport), tag, message, far());
  return transport.receive(previous_of(transport), tag, far());
}

// Compares everything but the strides.
::testing::AssertionResult same_message(const Message& expected, const Message& found) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure() << found.size() << " tensors, expected " << expected.size();
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& sent = expected[i];
    const at::Tensor& received = found[i];
    const bool same =
        sent.defined() == received.defined() &&
        (!sent.defined() ||
         (sent.scalar_type() == received.scalar_type() && sent.sizes() == received.sizes() &&
          sent.requires_grad() == received.requires_grad() && same_bits(sent.resolve_conj(), received.resolve_conj())));
    if (same) continue;
    return ::testing::AssertionFailure() << "tensor " << i << "\nexpected: " << text(sent)
                                         << "\nfound:    " << text(received);
  }
  return ::testing::AssertionSuccess();
}

struct Payload {
  const char* name;
  Message message;
};
// Returns messages of all kinds. Their shapes depend on `size`.
std::vector<Payload> payloads(std::int64_t size) {
  std::vector<Payload> all{
      {"one", {counting({size, 3})}},
      {"nothing at all", {}},
      {"None", {at::Tensor()}},
      {"None among others", {at::Tensor(), counting({size}), at::Tensor(), counting({2, size}), at::Tensor()}},
      {"a scalar", {at::full({}, static_cast<double>(size))}},
      {"no elements", {at::zeros({0, size}), at::zeros({size, 0}, at::kLong)}},
      {"no elements among others", {at::zeros({0, 4}), counting({size}), at::zeros({0})}},
      {"transposed", {counting({size, 3}).t()}},
      {"channels last", {counting({2, 3, size, 5}).contiguous(at::MemoryFormat::ChannelsLast)}},
      {"with gaps", {counting({size, 6}).narrow(1, 1, 3)}},
      {"every second", {counting({2 * size}).slice(0, 0, 2 * size, 2)}},
      {"expanded", {counting({size, 1}).expand({size, 7}), at::ones({}).expand({3, size})}},
      {"conjugate", {at::view_as_complex(counting({size, 2})).conj()}},
      {"requires grad", {counting({size}).requires_grad_(), counting({size})}},
      {"not a leaf", {counting({size}).requires_grad_() * 2}},
      {"four MiB", {counting({1024, 1024})}},
      {"twice the same", {}},
  };
  const at::Tensor same = counting({size, 2});
  all.back().message = {same, same};
  std::vector<at::Tensor> many;
  for (int i = 0; i < 40; ++i) many.push_back(counting({i % 3 + 1, size, 2}));
  all.push_back({"forty", many});
  for (const at::ScalarType dtype : kDtypes) all.push_back({c10::toString(dtype), {counting({size, 2}).to(dtype)}});
  return all;
}

void expect_all_around(Transport& transport, std::int64_t size) {
  std::uint32_t number = 0;
  for (const Payload& payload : payloads(size)) {
    SCOPED_TRACE(payload.name);
    for (const std::uint32_t channel : {2, 3}) {
      const Message found = around(transport, {.channel = channel, .number = number}, payload.message);
      EXPECT_TRUE(same_message(payload.message, found));
    }
    ++number;
  }
}

TEST_P(EveryWorld, DeliversEveryMessageUnchanged) {
  world().run([](Transport& transport) { expect_all_around(transport, 4); });
}

TEST_P(EveryWorld, DeliversEveryMessageUnchangedInEveryStep) {
  world().run([](Transport& transport) {
    for (int step = 0; step < 3; ++step) {
      transport.begin_step(/*signature=*/1);
      expect_all_around(transport, 4);
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, DeliversMessagesOfOtherSizesInTheNextStep) {
  world().run([](Transport& transport) {
    for (const std::int64_t size : {4, 6, 6, 2, 5, 5, 4}) {
      transport.begin_step(static_cast<std::uint64_t>(size));
      expect_all_around(transport, size);
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, DeliversMessagesOfAnySizeWithDynamicShapes) {
  world({.dynamic_shapes = true}).run([](Transport& transport) {
    for (const std::int64_t size : {4, 6, 2, 5}) {
      transport.begin_step(/*signature=*/1);
      expect_all_around(transport, size);
      transport.end_step(far());
    }
  });
}

// As in a pipeline: only the first rank knows the sizes of the batch, and the others learn them from messages.
TEST_P(EveryWorld, PropagatesSizesThatOnlyOneRankKnows) {
  world().run([](Transport& transport) {
    const int rank = transport.rank();
    const int last = transport.ranks() - 1;
    for (const std::int64_t size : {4, 4, 7, 7, 7, 3}) {
      transport.begin_step(rank == 0 ? static_cast<std::uint64_t>(size) : 0);
      for (std::uint32_t number = 0; number < 3; ++number) {
        if (rank > 0) transport.post_receive(rank - 1, {.channel = 2, .number = number});
        if (rank < last) transport.post_receive(rank + 1, {.channel = 3, .number = number});
      }
      for (std::uint32_t number = 0; number < 3; ++number) {
        Message message{counting({size, static_cast<std::int64_t>(number) + 1})};
        if (rank > 0) message = transport.receive(rank - 1, {.channel = 2, .number = number}, far());
        EXPECT_TRUE(same_message({counting({size, static_cast<std::int64_t>(number) + 1})}, message));
        if (rank < last) transport.send(rank + 1, {.channel = 2, .number = number}, message, far());
        if (rank < last) message = transport.receive(rank + 1, {.channel = 3, .number = number}, far());
        if (rank > 0) transport.send(rank - 1, {.channel = 3, .number = number}, message, far());
      }
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, AllowsNewChannelsAndFewerMessagesInALaterStep) {
  world().run([](Transport& transport) {
    for (std::uint32_t step = 0; step < 4; ++step) {
      // Steps 0 and 1 are alike, and so are steps 2 and 3.
      transport.begin_step(step / 2);
      for (std::uint32_t channel = step / 2; channel < 4; ++channel) {
        for (std::uint32_t number = 0; number < 5 - step / 2; ++number) {
          const Message message{counting({number + 1, channel + 1})};
          EXPECT_TRUE(same_message(message, around(transport, {.channel = channel, .number = number}, message)));
        }
      }
      EXPECT_TRUE(
          same_message({counting({3})}, around(transport, {.channel = 6 + step, .number = 1}, {counting({3})})));
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, KeepsTheOrderOfTheMessagesOfATag) {
  world().run([](Transport& transport) {
    for (int step = 0; step < 3; ++step) {
      transport.begin_step(1);
      constexpr std::int64_t kMessages = 20;
      for (std::int64_t i = 0; i < kMessages; ++i) transport.post_receive(previous_of(transport), kActivation);
      for (std::int64_t i = 0; i < kMessages; ++i) {
        transport.send(next_of(transport), kActivation, {at::full({i % 4 + 1}, i)}, far());
      }
      for (std::int64_t i = 0; i < kMessages; ++i) {
        const Message found = transport.receive(previous_of(transport), kActivation, far());
        EXPECT_TRUE(same_message({at::full({i % 4 + 1}, i)}, found)) << "message " << i;
      }
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, DeliversMessagesInTheOrderOfTheReceives) {
  world().run([](Transport& transport) {
    for (int step = 0; step < 3; ++step) {
      transport.begin_step(1);
      constexpr std::uint32_t kMessages = 8;
      for (std::uint32_t i = 0; i < kMessages; ++i)
        transport.post_receive(previous_of(transport), {.channel = 0, .number = i});
      for (const std::uint32_t i : {3, 1, 0, 7, 6, 2, 5, 4}) {
        transport.send(next_of(transport), {.channel = 0, .number = i}, {at::full({i + 1}, static_cast<double>(i))},
                       far());
      }
      for (const std::uint32_t i : {5, 0, 7, 2, 1, 6, 4, 3}) {
        const Message found = transport.receive(previous_of(transport), {.channel = 0, .number = i}, far());
        EXPECT_TRUE(same_message({at::full({i + 1}, static_cast<double>(i))}, found)) << "message " << i;
      }
      transport.end_step(far());
    }
  });
}

// Each rank sends in both directions before it receives anything.
TEST_P(EveryWorld, SendsActivationsAndGradientsIndependently) {
  world().run([](Transport& transport) {
    for (int step = 0; step < 3; ++step) {
      transport.begin_step(1);
      for (std::uint32_t number = 0; number < 3; ++number) {
        transport.post_receive(previous_of(transport), {.channel = 0, .number = number});
        transport.post_receive(next_of(transport), {.channel = 1, .number = number});
      }
      const at::Tensor large = counting({512, 1024});
      for (std::uint32_t number = 0; number < 3; ++number) {
        transport.send(next_of(transport), {.channel = 0, .number = number}, {large + static_cast<double>(number)},
                       far());
        transport.send(previous_of(transport), {.channel = 1, .number = number}, {large - static_cast<double>(number)},
                       far());
      }
      for (std::uint32_t number = 0; number < 3; ++number) {
        const Message gradient = transport.receive(next_of(transport), {.channel = 1, .number = number}, far());
        EXPECT_TRUE(same_message({large - static_cast<double>(number)}, gradient));
        const Message activation = transport.receive(previous_of(transport), {.channel = 0, .number = number}, far());
        EXPECT_TRUE(same_message({large + static_cast<double>(number)}, activation));
      }
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, SendsManyMessagesAheadOfTheirReceiver) {
  world().run([](Transport& transport) {
    for (int step = 0; step < 2; ++step) {
      transport.begin_step(1);
      constexpr std::uint32_t kMessages = 300;
      for (std::uint32_t i = 0; i < kMessages; ++i)
        transport.post_receive(previous_of(transport), {.channel = 0, .number = i});
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        transport.send(next_of(transport), {.channel = 0, .number = i}, {at::full({5}, static_cast<double>(i))}, far());
      }
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        const Message found = transport.receive(previous_of(transport), {.channel = 0, .number = i}, far());
        ASSERT_TRUE(same_message({at::full({5}, static_cast<double>(i))}, found)) << "message " << i;
      }
      transport.end_step(far());
    }
  });
}

TEST_P(EveryWorld, KnowsItsRanks) {
  World all = world();
  for (int rank = 0; rank < all.ranks(); ++rank) {
    EXPECT_EQ(all[rank].rank(), rank);
    EXPECT_EQ(all[rank].ranks(), GetParam().ranks);
  }
}

TEST_P(EveryWorld, TimesOutWithoutAMessageAndDeliversItLater) {
  World all = world();
  all[1].post_receive(0, kActivation);
  const Thrown found = thrown_by([&] { all[1].receive(0, kActivation, soon()); });
  EXPECT_EQ(found, timeout(0, "no message came from rank 0 within the deadline"));
  all.run([](Transport& transport) {
    if (transport.rank() == 0) {
      transport.send(1, kActivation, {counting({5})}, far());
      transport.end_step(far());
    } else if (transport.rank() == 1) {
      EXPECT_TRUE(same_message({counting({5})}, transport.receive(0, kActivation, far())));
    }
  });
}

TEST_P(EveryWorld, TimesOutWhenNoReceiveIsPosted) {
  World all = world();
  const Thrown found = thrown_by([&] {
    all[0].send(1, kActivation, {counting({5})}, soon());
    all[0].end_step(soon());
  });
  EXPECT_EQ(found, timeout(1, "no receive was posted on rank 1 within the deadline"));
}

// Waits in a different way on each rank.
void wait_for_nothing(Transport& transport, Group& group) {
  switch (transport.rank() % 3) {
    case 0: transport.receive(next_of(transport), kGradient, far()); break;
    case 1: group.barrier()->wait(far()); break;
    default: transport.send(next_of(transport), kActivation, {counting({5})}, far()); transport.end_step(far());
  }
}

TEST_P(EveryWorld, EndsAllWaitsOnAllRanksWhenOneAborts) {
  World all = world();
  std::atomic<int> ready = 0;
  std::vector<Thrown> found(static_cast<std::size_t>(all.ranks()));
  all.run([&](Transport& transport) {
    std::vector<int> all_ranks(static_cast<std::size_t>(transport.ranks()));
    for (int i = 0; i < transport.ranks(); ++i) all_ranks[static_cast<std::size_t>(i)] = i;
    const auto group = transport.group(all_ranks);
    ++ready;
    if (transport.rank() == transport.ranks() - 1) {
      while (ready < transport.ranks()) std::this_thread::yield();
      transport.abort("stage 3 is out of memory");
      transport.abort("a second reason is ignored");
    } else {
      found[static_cast<std::size_t>(transport.rank())] = thrown_by([&] { wait_for_nothing(transport, *group); });
    }
    // Later waits end too.
    EXPECT_EQ(thrown_by([&] { transport.receive(next_of(transport), kActivation, far()); }),
              aborted("stage 3 is out of memory"));
  });
  found.pop_back();
  for (const Thrown& thrown : found) EXPECT_EQ(thrown, aborted("stage 3 is out of memory"));
}

TEST_P(EveryWorld, TimesOutWhenAMemberOfAGroupIsMissing) {
  World all = world();
  std::vector<std::shared_ptr<Group>> groups(2);
  all.run([&](Transport& transport) {
    if (transport.rank() > 1) return;
    const auto group = groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1});
    if (transport.rank() == 1) return;
    EXPECT_EQ(thrown_by([&] { group->barrier()->wait(soon()); }),
              timeout(TransportError::kNoPeer, "not all ranks of a group have arrived within the deadline"));
  });
}

TEST(ThreadTransport, RefusesTagsThatDoNotFit) {
  World world(Carrier::Threads, 2);
  const std::string range = "; numbers and channels go from 0 to 16777215.";
  const Tag large_number{.channel = 3, .number = 16777216};
  const Tag large_channel{.channel = 16777216, .number = 1};
  const std::string number_error = "a message has number 16777216 in channel 3" + range;
  const std::string channel_error = "a message has number 1 in channel 16777216" + range;
  expect_error<std::invalid_argument>([&] { world[1].post_receive(0, large_number); }, number_error);
  expect_error<std::invalid_argument>([&] { world[0].send(1, large_number, {}, far()); }, number_error);
  expect_error<std::invalid_argument>([&] { world[1].receive(0, large_channel, far()); }, channel_error);
  // A refused call is no wait, and the largest tag is delivered.
  EXPECT_EQ(world[1].waiting_for(), Transport::kNoPeer);
  const Tag largest{.channel = 16777215, .number = 16777215};
  world[1].post_receive(0, largest);
  world[0].send(1, largest, {counting({3})}, far());
  EXPECT_TRUE(same_message({counting({3})}, world[1].receive(0, largest, far())));
}

TEST(ThreadTransport, RefusesMoreRanksThanAKeyCanName) {
  expect_error<std::invalid_argument>([] { thread_transports(65537); },
                                      "there are 65537 thread ranks, expected 65536 at most.");
}

TEST_P(EveryWorld, RefusesAGroupWithoutTheRankThatAsks) {
  World all = world();
  expect_error<std::invalid_argument>([&] { all[0].group({1}); },
                                      "rank 0 is not a member of the group that it asks for");
}

TEST_P(EveryWorld, CanBeDestroyedWithReceivesPostedAndMessagesInFlight) {
  World all = world();
  all.run([](Transport& transport) {
    for (std::uint32_t i = 0; i < 5; ++i) transport.post_receive(previous_of(transport), {.channel = 0, .number = i});
    transport.send(next_of(transport), {.channel = 0, .number = 3}, {counting({2000})}, far());
  });
}

}  // namespace
}  // namespace penstock::internal::testing
