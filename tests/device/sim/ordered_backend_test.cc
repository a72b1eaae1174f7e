// The ordered backend follows NCCL's rules.
#include "tests/device/sim/ordered_backend.h"

#include <ATen/DeviceAccelerator.h>

#include <exception>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::seconds(30);

// One rank of a test, on a thread and a device of its own.
struct Rank {
  int rank = 0;
  at::Device device = at::kCPU;
  c10::intrusive_ptr<c10d::Store> store;

  at::TensorOptions options() const { return at::TensorOptions(device); }
  // Creates a backend of all ranks; `name` tells those of one rank apart.
  Backend backend(int ranks, const std::string& name = "all") const {
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(name, store);
    return make_backend(prefixed, rank, ranks, device);
  }
};

class OrderedBackend : public SimTest {
 protected:
  void run(int ranks, const std::function<void(const Rank&)>& function) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          function({rank, device(rank), store});
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

c10::intrusive_ptr<c10d::Work> send(const Backend& backend, const at::Tensor& tensor, int peer, int tag = 0) {
  Tensors tensors{tensor};
  return backend->send(tensors, peer, tag);
}
c10::intrusive_ptr<c10d::Work> receive(const Backend& backend, const at::Tensor& tensor, int peer, int tag = 0) {
  Tensors tensors{tensor};
  return backend->recv(tensors, peer, tag);
}
// Returns a connected backend of ranks 0 and 1, which have exchanged their first message.
Backend connected(const Rank& self, const std::string& name = "all") {
  Backend backend = self.backend(2, name);
  backend->eagerConnectSingleDevice(self.device);
  const at::Tensor byte = at::zeros({1}, self.options().dtype(at::kByte));
  (self.rank == 0 ? send(backend, byte, 1) : receive(backend, byte, 0))->wait(kLong);
  return backend;
}
std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST_F(OrderedBackend, MatchesByOrderAndIgnoresTags) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    if (self.rank == 0) {
      send(backend, at::full({8}, 1.0, self.options()), 1, /*tag=*/5)->wait();
      send(backend, at::full({8}, 2.0, self.options()), 1, /*tag=*/6)->wait();
      synchronize(self.device);
    } else {
      const at::Tensor first = at::empty({8}, self.options());
      const at::Tensor second = at::empty({8}, self.options());
      receive(backend, first, 0, /*tag=*/6)->wait();
      receive(backend, second, 0, /*tag=*/5)->wait();
      EXPECT_TRUE(same_bits({first, second}, {at::full({8}, 1.0), at::full({8}, 2.0)}));
    }
  });
}

TEST_F(OrderedBackend, DoesNotBlockTheHostInWait) {
  std::promise<void> waited;
  run(2, [&](const Rank& self) {
    const Backend backend = connected(self);
    const at::Tensor tensor = at::full({8}, 1.0 * self.rank, self.options());
    if (self.rank == 0) {
      waited.get_future().wait();
      send(backend, tensor, 1)->wait(kLong);
      return;
    }
    const auto work = receive(backend, tensor, 0);
    EXPECT_TRUE(work->wait());
    const at::Tensor sum = tensor + 1;
    EXPECT_FALSE(work->isCompleted());
    waited.set_value();
    EXPECT_TRUE(same_bits({sum}, {at::full({8}, 1.0)}));
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(work->exception(), nullptr);
  });
}

// Connected eagerly, or at the first use.
class OrderedBackendConnected : public OrderedBackend, public testing::WithParamInterface<bool> {};

// Both ranks post a receive and then a send: neither send gets its turn.
TEST_P(OrderedBackendConnected, ReceivesBlockSendsOfTheirCommunicator) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    if (GetParam()) backend->eagerConnectSingleDevice(self.device);
    const at::Tensor in = at::empty({8}, self.options());
    const at::Tensor out = at::ones({8}, self.options());
    const auto receiving = receive(backend, in, 1 - self.rank);
    const auto sending = send(backend, out, 1 - self.rank);
    EXPECT_TRUE(contains(message_of([&] { sending->wait(milliseconds(300)); }), "was aborted"));
    EXPECT_TRUE(contains(message_of([&] { send(backend, out, 1 - self.rank); }), "was aborted"));
    EXPECT_TRUE(receiving->isCompleted());
    EXPECT_NE(receiving->exception(), nullptr);
    synchronize(self.device);
  });
}

// Two ranks connect at their first message, whatever the backend has connected before.
TEST_P(OrderedBackendConnected, BlocksTheFirstMessageUntilThePeerComes) {
  std::promise<void> ended;
  run(2, [&](const Rank& self) {
    const Backend backend = self.backend(2);
    if (GetParam()) backend->eagerConnectSingleDevice(self.device);
    if (self.rank == 1) {
      ended.get_future().wait();
      return;
    }
    // Rank 1 sends nothing, so that only abort() ends the send.
    std::future<std::string> sending = std::async(
        std::launch::async, [&] { return message_of([&] { send(backend, at::ones({8}, self.options()), 1); }); });
    backend->abort();
    EXPECT_TRUE(contains(sending.get(), "abort() was called"));
    ended.set_value();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, OrderedBackendConnected, testing::Bool(),
                         [](const auto& test) { return test.param ? "Eagerly" : "AtFirstUse"; });

TEST_F(OrderedBackend, LetsReceivesBePostedAheadOnABackendForEachDirection) {
  run(2, [](const Rank& self) {
    const Backend up = connected(self, "up");
    const Backend down = connected(self, "down");
    const at::Tensor in = at::empty({8}, self.options());
    const at::Tensor out = at::full({8}, 1.0 * self.rank, self.options());
    const auto receiving = receive(self.rank == 0 ? down : up, in, 1 - self.rank);
    const auto sending = send(self.rank == 0 ? up : down, out, 1 - self.rank);
    EXPECT_TRUE(receiving->wait(kLong));
    EXPECT_TRUE(sending->wait(kLong));
    EXPECT_TRUE(same_bits({in}, {at::full({8}, 1.0 - self.rank)}));
  });
}

TEST_F(OrderedBackend, EndsWhatIsInFlightByAbort) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    backend->eagerConnectSingleDevice(self.device);
    if (self.rank == 1) {
      // Ends with rank 0, whose connections close.
      const auto work = receive(backend, at::empty({8}, self.options()), 0);
      EXPECT_NE(message_of([&] { work->wait(kLong); }), "nothing was thrown");
      return;
    }
    const at::Tensor tensor = at::empty({8}, self.options());
    const auto work = receive(backend, tensor, 1);
    work->wait();
    const at::Tensor used = tensor + 1;
    EXPECT_FALSE(work->isCompleted());
    backend->abort();
    synchronize(self.device);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_NE(work->exception(), nullptr);
    EXPECT_TRUE(contains(message_of([&] { work->wait(); }), "abort() was called"));
    EXPECT_TRUE(contains(message_of([&] { send(backend, tensor, 1); }), "abort() was called"));
    EXPECT_THROW(work->isSuccess(), c10::Error);
  });
}

TEST_F(OrderedBackend, ReportsSizesThatDiffer) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    const at::Tensor tensor = at::zeros({self.rank == 0 ? 8 : 6}, self.options());
    const auto work = self.rank == 0 ? send(backend, tensor, 1) : receive(backend, tensor, 0);
    const std::string message = message_of([&] { work->wait(kLong); });
    EXPECT_TRUE(contains(message, self.rank == 0 ? "rank 0 transfers 32 bytes while rank 1 transfers 24"
                                                 : "rank 1 transfers 24 bytes while rank 0 transfers 32"));
  });
}

TEST_F(OrderedBackend, RunsCollectivesInTheOrderOfRanks) {
  run(3, [](const Rank& self) {
    const Backend backend = self.backend(3);
    backend->eagerConnectSingleDevice(self.device);
    // The sum depends on the order.
    const std::vector<float> addends{1.0F, 1e8F, -1e8F};
    const float expected = (addends[0] + addends[1]) + addends[2];
    const float own = addends[static_cast<std::size_t>(self.rank)];

    Tensors sum{at::full({2, 4}, own, self.options())};
    backend->allreduce(sum)->wait();
    Tensors half{at::full({4}, self.rank + 1, self.options().dtype(at::kBFloat16))};
    backend->allreduce(half)->wait();
    Tensors root{at::full({4}, 1.0 * self.rank, self.options())};
    c10d::BroadcastOptions from_one;
    from_one.rootRank = 1;
    backend->broadcast(root, from_one)->wait();
    at::Tensor gathered = at::empty({6}, self.options());
    at::Tensor part = at::full({2}, 1.0 * self.rank, self.options());
    backend->_allgather_base(gathered, part)->wait();
    at::Tensor scattered = at::empty({2}, self.options());
    at::Tensor whole = at::arange(6.0, self.options().dtype(at::kFloat)) * (self.rank + 1);
    backend->_reduce_scatter_base(scattered, whole)->wait();
    backend->barrier()->wait();

    EXPECT_TRUE(
        same_bits({sum[0], half[0], root[0], gathered, scattered},
                  {at::full({2, 4}, expected), at::full({4}, 6, at::kBFloat16), at::full({4}, 1.0F),
                   at::tensor({0.0F, 0.0F, 1.0F, 1.0F, 2.0F, 2.0F}),
                   at::tensor({12.0F * static_cast<float>(self.rank), 12.0F * static_cast<float>(self.rank) + 6})}));
  });
}

TEST_F(OrderedBackend, RacesWithAUseThatDoesNotWait) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    backend->eagerConnectSingleDevice(self.device);
    const at::Tensor tensor = at::zeros({8}, self.options());
    const auto work = self.rank == 0 ? send(backend, tensor, 1) : receive(backend, tensor, 0);
    const at::Tensor used = tensor + 1;
    work->wait(kLong);
  });
  const auto races = take_races();
  ASSERT_EQ(races.size(), 1U);
  EXPECT_TRUE(contains(races[0], "recv writes bytes 0 to 32 (tensor [8])"));
}

TEST_F(OrderedBackend, KeepsTensorsWhileTheirWorkLives) {
  run(2, [](const Rank& self) {
    const Backend backend = self.backend(2);
    backend->eagerConnectSingleDevice(self.device);
    constexpr std::int64_t kSize = 54'321;
    const void* pointer = nullptr;
    at::Tensor received = at::empty({kSize}, self.options());
    for (const bool keep : {true, false}) {
      c10::intrusive_ptr<c10d::Work> work;
      {
        const at::Tensor tensor = self.rank == 0 ? at::ones({kSize}, self.options()) : received;
        pointer = tensor.const_data_ptr();
        work = self.rank == 0 ? send(backend, tensor, 1) : receive(backend, tensor, 0);
      }
      if (self.rank == 1) {
        work->wait();
        continue;
      }
      if (!keep) work.reset();
      const at::Tensor other = at::zeros({kSize}, self.options());
      EXPECT_EQ(other.const_data_ptr() != pointer, keep);
      if (keep) work->wait(kLong);
    }
    synchronize(self.device);
  });
  const auto races = take_races();
  ASSERT_EQ(races.size(), 1U);
  EXPECT_TRUE(contains(races[0], "freed and allocated again"));
}

}  // namespace
}  // namespace penstock::sim
