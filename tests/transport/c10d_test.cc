// Properties of process ranks only: cached shapes, reused memory, lost connections.
#include "penstock/transport/c10d.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "penstock/tensor/metadata.h"
#include "penstock/transport/block_pool.h"
#include "penstock/transport/gloo.h"
#include "penstock/transport/membership.h"
#include "penstock/transport/wire.h"
#include "tests/tensor/values.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr Tag kTag{.channel = 4, .number = 2};
constexpr const char* kHint =
    "\n  Hint: set dynamic_shapes to send shapes with every message; otherwise they may change only when the batch's "
    "do.";

TEST(BlockPool, ReusesABlockWhenItsTensorIsDestroyed) {
  const auto pool = BlockPool::make();
  const void* first = nullptr;
  for (int i = 0; i < 100; ++i) {
    at::Tensor tensor = pool->empty({10, 10}, {10, 1}, at::kFloat);
    if (i == 0) first = tensor.data_ptr();
    EXPECT_EQ(tensor.data_ptr(), first);
    // A view keeps the block in use.
    const at::Tensor view = tensor.narrow(0, 2, 3);
    tensor.reset();
    EXPECT_EQ(pool->bytes_in_use(), 448U);
  }
  EXPECT_EQ(pool->bytes_in_use(), 0U);
  EXPECT_EQ(pool->bytes(), 448U);
}

TEST(BlockPool, MakesBlocksThatAreAtMostAnEighthTooLarge) {
  const auto pool = BlockPool::make();
  for (const std::size_t size : {1UL, 64UL, 65UL, 1000UL, 4096UL, 5000UL, 1'000'003UL}) {
    const at::Tensor tensor = pool->empty_bytes(size);
    EXPECT_EQ(tensor.nbytes(), size);
    EXPECT_GE(pool->bytes_in_use(), size);
    EXPECT_LE(pool->bytes_in_use(), std::max<std::size_t>(size + size / 8, size + 63));
  }
}

TEST(BlockPool, FreesBlocksThatWereNotUsedInAStep) {
  const auto pool = BlockPool::make();
  {
    const at::Tensor large = pool->empty_bytes(1 << 20);
  }
  pool->begin_step();
  EXPECT_EQ(pool->bytes(), 1U << 20U);
  {
    const at::Tensor small = pool->empty_bytes(1 << 10);
  }
  pool->begin_step();
  EXPECT_EQ(pool->bytes(), 1U << 10U);
  pool->trim();
  EXPECT_EQ(pool->bytes(), 0U);
}

TEST(BlockPool, LivesAsLongAsItsTensors) {
  auto pool = BlockPool::make();
  at::Tensor tensor = pool->empty({5}, {1}, at::kDouble);
  pool.reset();
  tensor.fill_(3);
  EXPECT_TRUE(same(at::full({5}, 3, at::kDouble), tensor));
}

TEST(Header, CarriesTheMetadataOfAnyNumberOfTensors) {
  for (const int count : {0, 1, 30, 3000}) {
    Metas metas;
    for (int i = 0; i < count; ++i) {
      metas.push_back(i % 5 == 4 ? std::nullopt : std::optional(TensorMeta(at::zeros({i % 7, 300}))));
    }
    const HeaderBytes header = internal::encode_header(metas);
    EXPECT_EQ(header.first.size(), kHeaderBytes);
    EXPECT_EQ(internal::rest_of_header(header.first), header.rest.size());
    EXPECT_EQ(internal::decode_header(header.first, header.rest), metas);
  }
}

TEST(WireTag, IsUniqueForEachMessageOfAGroup) {
  std::vector<int> tags;
  for (const std::uint32_t channel : {0U, 2U, 4U, 32766U}) {
    for (const std::uint32_t number : {0U, 1U, 2U, 32767U}) {
      for (const MessageKind kind : {MessageKind::Header, MessageKind::Data, MessageKind::FreshData}) {
        tags.push_back(internal::wire_tag({.channel = channel, .number = number}, kind));
      }
    }
    tags.push_back(internal::wire_tag({.channel = channel, .number = 5}, MessageKind::Opening));
  }
  EXPECT_GE(*std::min_element(tags.begin(), tags.end()), 0);
  std::sort(tags.begin(), tags.end());
  EXPECT_EQ(std::adjacent_find(tags.begin(), tags.end()), tags.end());
}

TEST(WireTag, NamesTheLargestNumberAndChannel) {
  expect_error<std::invalid_argument>(
      [] { internal::wire_tag({.channel = 3, .number = 32768}, MessageKind::Data); },
      "a message has number 32768 in channel 3; numbers and channels go from 0 to 32767.");
  expect_error<std::invalid_argument>(
      [] { internal::wire_tag({.channel = 40000, .number = 1}, MessageKind::Data); },
      "a message has number 1 in channel 40000; numbers and channels go from 0 to 32767.");
}

// Sends a message in each of two steps with the same signature, and returns the sender's error in the second.
std::string error_of_second(const Message& first, Tag first_tag, const Message& second, Tag second_tag) {
  World world(Carrier::Gloo, 2);
  const auto send = [&](Transport& transport, const Message& message, Tag tag) {
    transport.begin_step(1);
    if (transport.rank() == 0) {
      transport.send(1, tag, message, far());
    } else {
      transport.receive(0, tag, far());
    }
    transport.end_step(far());
  };
  world.run([&](Transport& transport) { send(transport, first, first_tag); });
  std::string found;
  const std::vector<std::string> errors = world.errors([&](Transport& transport) {
    try {
      send(transport, second, second_tag);
    } catch (const PipeliningShapeError& error) {
      if (transport.rank() == 0) found = error.what();
      throw;
    }
  });
  EXPECT_NE(errors[1], "");
  return found;
}

TEST(ShapeCache, RefusesShapesThatChangeWithoutANewSignature) {
  const Message expected{counting({2, 3}), at::Tensor()};
  const std::string tensor = "tensor 0 of message 2 of channel 4 to rank 1 is ";
  const std::string expectation =
      ", expected float32[2, 3] as in the step whose shapes are cached." + std::string(kHint);
  const auto error_of = [&](const Message& message) { return error_of_second(expected, kTag, message, kTag); };
  EXPECT_EQ(error_of({counting({2, 4}), at::Tensor()}), tensor + "float32[2, 4]" + expectation);
  EXPECT_EQ(error_of({counting({6}), at::Tensor()}), tensor + "float32[6]" + expectation);
  EXPECT_EQ(error_of({counting({2, 3}, at::kInt), at::Tensor()}), tensor + "int32[2, 3]" + expectation);
  EXPECT_EQ(error_of({counting({2, 3}).requires_grad_(), at::Tensor()}),
            tensor + "float32[2, 3], requires grad" + expectation);
  EXPECT_EQ(error_of({counting({3, 2}).t(), at::Tensor()}), tensor + "float32[2, 3] with strides [1, 2]" + expectation);
  EXPECT_EQ(error_of({at::Tensor(), at::Tensor()}), tensor + "None" + expectation);
  EXPECT_EQ(error_of({counting({2, 3}), counting({1})}),
            "tensor 1 of message 2 of channel 4 to rank 1 is float32[1], expected None as in the step whose shapes are "
            "cached." +
                std::string(kHint));
  EXPECT_EQ(error_of({counting({2, 3})}),
            "message 2 of channel 4 to rank 1 has 1 tensors, expected 2 as in the step whose shapes are cached." +
                std::string(kHint));
}

TEST(ShapeCache, RefusesAMessageThatWasNotSentBefore) {
  EXPECT_EQ(error_of_second({counting({2})}, kTag, {counting({2})}, {.channel = 4, .number = 3}),
            "message 3 of channel 4 to rank 1 was not sent in the step whose shapes are cached." + std::string(kHint));
}

TEST(C10dTransport, NamesAMessageThatWasPostedAndNotReceived) {
  World world(Carrier::Gloo, 2);
  world[1].begin_step(1);
  world[1].post_receive(0, kTag);
  expect_error<std::logic_error>(
      [&] { world[1].begin_step(1); },
      "message 2 of channel 4 from rank 0 was posted and not received before the next step.");
}

TEST(C10dTransport, KeepsTheStridesOfTensorsWithoutGaps) {
  World world(Carrier::Gloo, 2);
  const Message message{counting({3, 4}).t(), counting({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
                        counting({4, 3, 2}).permute({2, 0, 1})};
  world.run([&](Transport& transport) {
    if (transport.rank() == 0) {
      transport.send(1, kTag, message, far());
      transport.end_step(far());
      return;
    }
    const Message found = transport.receive(0, kTag, far());
    ASSERT_EQ(found.size(), message.size());
    for (std::size_t i = 0; i < message.size(); ++i) EXPECT_TRUE(same(message[i], found[i]));
  });
}

TEST(C10dTransport, DeliversTensorsThatCanBeChangedAndDifferentiated) {
  World world(Carrier::Gloo, 2);
  world.run([&](Transport& transport) {
    if (transport.rank() == 0) {
      transport.send(1, kTag, {counting({4}).requires_grad_()}, far());
      transport.end_step(far());
      return;
    }
    const at::Tensor found = transport.receive(0, kTag, far())[0];
    EXPECT_TRUE(found.is_leaf());
    (found * found).sum().backward();
    EXPECT_TRUE(same(counting({4}) * 2, found.grad()));
    found.detach().add_(1);
    EXPECT_TRUE(same(counting({4}) + 1, found.detach()));
  });
}

// Returns a tensor like Python's wrapper subclasses: it has sizes, and a storage without memory.
at::Tensor subclass_of(const at::Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.nbytes(), at::DataPtr(nullptr, at::kCPU),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_python_dispatch(true);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

TEST(C10dTransport, DescribesTensorsThatCannotBeSent) {
  World world(Carrier::Gloo, 2);
  const auto expect_unsendable = [&](const at::Tensor& tensor, const std::string& what) {
    expect_error<UnsendableTensor>(
        [&] { world[0].send(1, kTag, {at::ones(1), tensor}, far()); },
        "tensor 1 of the message is " + what +
            "; only dense tensors in the memory of the CPU or of an accelerator can be sent between processes.");
  };
  expect_unsendable(at::empty({2}, at::TensorOptions().device(at::kMeta)), "a float32 tensor of shape [2] on meta");
  expect_unsendable(at::zeros({2}).to_sparse(), "a sparse float32 tensor of shape [2]");
  expect_unsendable(at::eye(2).to_sparse_csr(), "a float32 tensor of shape [2, 2] with layout SparseCsr");
  expect_unsendable(at::zeros({2, 2}).to_mkldnn(), "a float32 tensor of shape [2, 2] with layout Mkldnn");
  expect_unsendable(at::quantize_per_tensor(at::zeros({2}), 1, 0, at::kQInt8), "a quantized qint8 tensor of shape [2]");
  expect_unsendable(at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})}), "a nested tensor");
  // A tensor whose storage was freed, like a sharded parameter that is not gathered.
  const at::Tensor freed = at::ones({2});
  freed.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr());
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  expect_unsendable(freed, "a float32 tensor of shape [2] without memory of its own");
  expect_unsendable(subclass_of(at::ones({2, 3})),
                    "a float32 tensor of shape [2, 3] of a tensor subclass, without memory of its own");
  // Nothing of the refused messages was sent.
  world.run([](Transport& transport) {
    if (transport.rank() == 0) {
      transport.send(1, kTag, {at::ones(3)}, far());
    } else {
      EXPECT_TRUE(at::equal(transport.receive(0, kTag, far()).at(0), at::ones(3)));
    }
  });
}

TEST(C10dTransport, RefusesRanksWithoutAConnection) {
  World world(Carrier::Gloo, 2);
  expect_error<std::invalid_argument>([&] { world[0].send(0, kTag, {}, far()); },
                                      "rank 0 of 2 has no connection to rank 0.");
  expect_error<std::invalid_argument>([&] { world[1].receive(2, kTag, far()); },
                                      "rank 1 of 2 has no connection to rank 2.");
}

TEST(C10dTransport, WorksWithOneRank) {
  World world(Carrier::Gloo, 1);
  world[0].begin_step(1);
  world[0].end_step(far());
  world[0].abort("there is no peer");
}

// Rank 1 completes the handshake and makes no connection, as if it were killed in between.
TEST(C10dTransport, ObservesItsTimeoutWhileGlooConnects) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  constexpr std::chrono::milliseconds kTimeout(300);
  Thrown found;
  on_threads(2, [&](int rank) {
    if (rank == 1) {
      internal::require_all_ranks(store, {.rank = 1, .ranks = 2});
    } else {
      found = thrown_by([&] { c10d_transport(store, 0, 2, {.timeout = kTimeout}); });
    }
  });
  EXPECT_EQ(found.why, TransportError::Why::Timeout);
  EXPECT_TRUE(found.what.starts_with("rank 0 has not connected to the other 1 ranks of control: ")) << found.what;
}

TEST(Gloo, NamesAnAddressOrInterfaceThatDoesNotExist) {
  const std::string hint = "'.\n  Hint: name one that this machine has; `ip address` lists them.";
  expect_error<std::runtime_error>([] { gloo_backends({.interface = "wlan7"}); },
                                   "Gloo cannot listen on the interface 'wlan7" + hint);
  expect_error<std::runtime_error>([] { gloo_backends({.address = "192.0.2.1"}); },
                                   "Gloo cannot listen on the address '192.0.2.1" + hint);
}

TEST(C10dTransport, ReportsARankThatHasEnded) {
  World world(Carrier::Gloo, 3);
  std::vector<Thrown> found(3);
  on_threads(3, [&](int rank) {
    if (rank == 1) {
      world.leave(1);
    } else {
      found[static_cast<std::size_t>(rank)] = thrown_by([&] { world[rank].receive(1, kTag, far()); });
    }
  });
  EXPECT_EQ(found[0], peer_lost(1, "rank 1 has ended"));
  EXPECT_EQ(found[2], peer_lost(1, "rank 1 has ended"));
  // The other ranks can still send to each other.
  on_threads(3, [&](int rank) {
    if (rank == 0) world[0].send(2, kTag, {counting({3})}, far());
    if (rank == 2) found[2] = thrown_by([&] { world[2].receive(0, kTag, far()); });
  });
  EXPECT_EQ(found[2], Thrown{});
}

TEST(C10dTransport, DeliversWhatWasSentBeforeARankEnded) {
  World world(Carrier::Gloo, 2);
  world[1].post_receive(0, kTag);
  on_threads(2, [&](int rank) {
    if (rank == 0) {
      world[0].send(1, kTag, {counting({100'000})}, far());
      world[0].end_step(far());
      world.leave(0);
    } else {
      EXPECT_TRUE(same(counting({100'000}), world[1].receive(0, kTag, far())[0]));
    }
  });
}

TEST(C10dTransport, ReusesReceiveMemory) {
  const auto pool = BlockPool::make();
  World world(Carrier::Gloo, 2, {}, pool);
  constexpr std::uint32_t kInFlight = 4;
  constexpr std::uint32_t kMessages = 1000;
  constexpr std::size_t kBytes = std::size_t{64} << 10U;
  std::size_t most = 0;
  world.run([&](Transport& transport) {
    for (int step = 0; step < 2; ++step) {
      transport.begin_step(1);
      const auto tag = [](std::uint32_t number) { return Tag{.channel = 0, .number = number}; };
      if (transport.rank() == 0) {
        for (std::uint32_t i = 0; i < kMessages; ++i) {
          transport.send(1, tag(i), {at::full({kBytes / 4}, static_cast<float>(i))}, far());
        }
      } else {
        for (std::uint32_t i = 0; i < kInFlight; ++i) transport.post_receive(0, tag(i));
        for (std::uint32_t i = 0; i < kMessages; ++i) {
          const at::Tensor found = transport.receive(0, tag(i), far())[0];
          if (i + kInFlight < kMessages) transport.post_receive(0, tag(i + kInFlight));
          ASSERT_EQ(found[7].item<float>(), static_cast<float>(i));
          most = std::max(most, pool->bytes());
        }
      }
      transport.end_step(far());
    }
  });
  // The messages in flight, the one that was just received, and headers.
  EXPECT_LE(most, (kInFlight + 2) * kBytes + std::size_t{16} * 320);
}

std::size_t entries_of(const char* directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

TEST(C10dTransport, LeavesNoThreadAndNoSocket) {
  const auto use_and_end = [](bool abort) {
    World world(Carrier::Gloo, 3);
    world.errors([abort](Transport& transport) {
      const auto group = transport.group({0, 1, 2});
      const at::Tensor tensor = at::ones({50'000});
      const auto work = group->all_reduce({tensor});
      if (transport.rank() != 2) transport.send(2, kTag, {tensor}, far());
      if (abort && transport.rank() == 1) throw std::runtime_error("enough");
      transport.receive((transport.rank() + 1) % 3, {.channel = 1, .number = 1}, soon());
    });
  };
  // The first world starts threads that stay for the whole process.
  use_and_end(false);
  const std::size_t threads = entries_of("/proc/self/task");
  const std::size_t files = entries_of("/proc/self/fd");
  for (const bool abort : {false, true, false}) use_and_end(abort);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
}

}  // namespace
}  // namespace penstock::internal::testing
