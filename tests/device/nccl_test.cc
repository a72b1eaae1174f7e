// Tests the properties of ProcessGroupNCCL that Penstock relies on, through the plugin. Ranks are threads, each with a
// device. The tests run on GPUs, or on the stand-in of tests/device/cuda_standin, which runs no kernels: tensors are made
// on the host.
#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <regex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/transport/device_backend.h"
#include "penstock/transport/rendezvous.h"
#include "tests/thrown.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

using namespace std::chrono_literals;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// Loads libtorch_cuda before the tests use libtorch, which would not find it later.
class LoadCuda : public ::testing::Environment {
 public:
  void SetUp() override { load_accelerator(); }
};
[[maybe_unused]] ::testing::Environment* const kLoadCuda = ::testing::AddGlobalTestEnvironment(new LoadCuda);

at::Device cuda(int index) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
at::Tensor filled(int device, std::int64_t count, double value) {
  return at::full({count}, value).to(cuda(device));
}
double first(const at::Tensor& tensor) {
  return tensor.cpu()[0].item<double>();
}

// Returns true if the condition becomes true before a deadline far beyond the duration of any test.
template <class Condition>
bool becomes_true(const Condition& condition) {
  const Deadline deadline = far();
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Waits for another rank, which sets the value.
void wait_for(std::promise<void>& promise) {
  if (promise.get_future().wait_until(far()) != std::future_status::ready) throw std::runtime_error("no value was set");
}

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "there are no devices";
    DeviceBackends backends = device_backends(at::kCUDA);
    ASSERT_TRUE(backends.create) << backends.reason;
    create_ = std::move(backends.create);
  }

  void TearDown() override {
    // A backend that is destroyed without this logs a warning. shutdown() may wait for the other ranks.
    for (const Backend& backend : backends_) backend->abort();
  }

  // Calls act(rank) on a thread for each rank, with its device as the current one. Skips the test without the devices.
  template <class Act>
  void on_ranks(int ranks, const Act& act) {
    if (at::accelerator::deviceCount() < ranks) {
      GTEST_SKIP() << "needs " << ranks << " devices, and there are " << at::accelerator::deviceCount();
    }
    on_threads(ranks, [&](int rank) {
      try {
        const c10::DeviceGuard guard(cuda(rank));
        act(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }

  Backend group(const std::string& name, int rank, int size, int device) {
    Backend backend = create_(c10::make_intrusive<c10d::PrefixStore>(name, store_), rank, size, cuda(device));
    const std::lock_guard lock(mutex_);
    backends_.push_back(backend);
    return backend;
  }
  Backend group(const std::string& name, int rank, int size) { return group(name, rank, size, rank); }

  DeviceBackendFactory create_;
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();

 private:
  std::mutex mutex_;
  std::vector<Backend> backends_;
};

TEST_F(Nccl, MatchesMessagesInOrderAndIgnoresTags) {
  on_ranks(2, [this](int rank) {
    const Backend edge = group("edge", rank, 2);
    if (rank == 0) {
      Tensors five{filled(0, 1000, 5)}, six{filled(0, 1000, 6)};
      const Work works[] = {edge->send(five, 1, /*tag=*/5), edge->send(six, 1, /*tag=*/6)};
      for (const Work& work : works) work->wait();
      at::accelerator::synchronizeDevice(0);
    } else {
      Tensors a{filled(1, 1000, 0)}, b{filled(1, 1000, 0)};
      const Work works[] = {edge->recv(a, 0, /*tag=*/6), edge->recv(b, 0, /*tag=*/5)};
      for (const Work& work : works) work->wait();
      EXPECT_EQ(first(a[0]), 5);
      EXPECT_EQ(first(b[0]), 6);
    }
  });
}

TEST_F(Nccl, WaitBlocksTheStreamAndNotTheHost) {
  std::promise<void> waited;
  on_ranks(2, [&](int rank) {
    const Backend edge = group("edge", rank, 2);
    if (rank == 0) {
      Tensors sent{filled(0, 1000, 7)};
      wait_for(waited);
      edge->send(sent, 1, 0)->wait();
      at::accelerator::synchronizeDevice(0);
    } else {
      Tensors received{filled(1, 1000, 0)};
      const Work work = edge->recv(received, 0, 0);
      work->wait();
      EXPECT_FALSE(work->isCompleted());
      waited.set_value();
      // The copy to the host is on the stream that waits.
      EXPECT_EQ(first(received[0]), 7);
    }
  });
}

TEST_F(Nccl, CompletesWithoutAWait) {
  on_ranks(2, [this](int rank) {
    const Backend edge = group("edge", rank, 2);
    Tensors data{filled(rank, 1000, 1 + rank)};
    const Work work = rank == 0 ? edge->send(data, 1, 0) : edge->recv(data, 0, 0);
    EXPECT_TRUE(becomes_true([&] { return work->isCompleted(); }));
    EXPECT_EQ(work->exception(), nullptr);
    EXPECT_EQ(first(data[0]), 1);
  });
}

TEST_F(Nccl, AbortEndsWhatIsInFlight) {
  std::promise<void> done;
  on_ranks(2, [&](int rank) {
    const Backend edge = group("edge", rank, 2);
    if (rank == 0) {
      wait_for(done);
      edge->abort();
    } else {
      Tensors data{filled(1, 1000, 0)};
      const Work work = edge->recv(data, 0, 0);
      work->wait();
      EXPECT_FALSE(work->isCompleted());
      std::future<void> idle = std::async(std::launch::async, [&edge] {
        edge->abort();
        at::accelerator::synchronizeDevice(1);
      });
      EXPECT_EQ(idle.wait_until(far()), std::future_status::ready);
      EXPECT_NE(message_of([&] { edge->recv(data, 0, 0); }).find("NCCL communicator was aborted"), std::string::npos);
      done.set_value();
    }
  });
}

TEST_F(Nccl, ReceivesArePostedAheadOnOneGroupForEachDirection) {
  constexpr int kMicrobatches = 4;
  on_ranks(2, [this](int rank) {
    const Backend down = group("0->1", rank, 2), up = group("1->0", rank, 2);
    const Backend& in = rank == 0 ? up : down;
    const Backend& out = rank == 0 ? down : up;
    std::vector<Tensors> received, sent;
    std::vector<Work> receives, sends;
    for (int mb = 0; mb < kMicrobatches; ++mb) {
      received.push_back({filled(rank, 1000, 0)});
      receives.push_back(in->recv(received.back(), 1 - rank, 0));
    }
    for (int mb = 0; mb < kMicrobatches; ++mb) {
      sent.push_back({filled(rank, 1000, 100 * rank + mb)});
      sends.push_back(out->send(sent.back(), 1 - rank, 0));
    }
    for (int mb = 0; mb < kMicrobatches; ++mb) {
      const auto index = static_cast<std::size_t>(mb);
      receives[index]->wait();
      EXPECT_EQ(first(received[index][0]), 100 * (1 - rank) + mb);
    }
    for (const Work& send : sends) EXPECT_TRUE(becomes_true([&] { return send->isCompleted(); }));
  });
}

TEST_F(Nccl, OneGroupForBothDirectionsHangs) {
  on_ranks(2, [this](int rank) {
    const Backend both = group("both", rank, 2), fence = group("fence", rank, 2);
    Tensors received{filled(rank, 1000, 0)}, sent{filled(rank, 1000, 1)};
    const Work receive = both->recv(received, 1 - rank, 0);
    const Work send = both->send(sent, 1 - rank, 0);
    // Both ranks have posted all, and another group makes progress.
    for (int round = 0; round < 20; ++round) {
      Tensors sum{filled(rank, 10, 1)};
      fence->allreduce(sum)->wait();
      EXPECT_EQ(first(sum[0]), 2);
    }
    EXPECT_FALSE(receive->isCompleted());
    EXPECT_FALSE(send->isCompleted());
    both->abort();
    at::accelerator::synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
  });
}

TEST_F(Nccl, KeepsTheMemoryOfASendUntilItCompletes) {
  std::promise<void> checked;
  on_ranks(2, [&](int rank) {
    const Backend edge = group("edge", rank, 2);
    // Far more than NCCL's buffers hold, so that the send cannot complete without its receive.
    constexpr std::int64_t kCount = 8'000'000;
    if (rank == 0) {
      const auto is_reused = [](const void* address) {
        Tensors tensors;
        for (int i = 0; i < 8; ++i) tensors.push_back(at::empty({kCount}, at::TensorOptions().device(cuda(0))));
        return std::any_of(tensors.begin(), tensors.end(),
                           [&](const at::Tensor& t) { return t.data_ptr() == address; });
      };
      Tensors sent{filled(0, kCount, 7)};
      const void* const address = sent[0].data_ptr();
      edge->send(sent, 1, 0);
      sent.clear();
      EXPECT_FALSE(is_reused(address));
      checked.set_value();
      EXPECT_TRUE(becomes_true([&] { return is_reused(address); }));
    } else {
      wait_for(checked);
      Tensors received{filled(1, kCount, 0)};
      edge->recv(received, 0, 0)->wait();
      EXPECT_EQ(first(received[0]), 7);
    }
  });
}

TEST_F(Nccl, GroupsOfTwoConnectTheRanksOfALargerWorld) {
  constexpr int kRanks = 3;
  on_ranks(kRanks, [this](int rank) {
    const std::vector<std::pair<int, int>> edges{{0, 1}, {1, 0}, {1, 2}, {2, 1}};
    std::vector<Backend> groups;
    for (const auto& [from, to] : edges) {
      const bool member = rank == from || rank == to;
      groups.push_back(member ? group(std::to_string(from) + "->" + std::to_string(to), rank == from ? 0 : 1, 2, rank)
                              : Backend());
    }
    std::vector<std::pair<Work, Tensors>> in_flight;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      const auto [from, to] = edges[i];
      if (!groups[i]) continue;
      Tensors data{filled(rank, 10, rank == from ? 10 * from + to : 0)};
      Work work = rank == from ? groups[i]->send(data, 1, 0) : groups[i]->recv(data, 0, 0);
      in_flight.emplace_back(std::move(work), data);
      if (rank == from) continue;
      in_flight.back().first->wait();
      EXPECT_EQ(first(data[0]), 10 * from + to);
    }
    for (const auto& [work, data] : in_flight) EXPECT_TRUE(becomes_true([&] { return work->isCompleted(); }));
  });
}

TEST_F(Nccl, RunsCollectives) {
  for (const int ranks : {2, 3, 4}) {
    if (at::accelerator::deviceCount() < ranks) break;
    on_ranks(ranks, [&](int rank) {
      const Backend all = group("all " + std::to_string(ranks), rank, ranks);
      const double sum = ranks * (ranks + 1) / 2.0;
      Tensors reduced{filled(rank, 1000, rank + 1)};
      all->allreduce(reduced)->wait();
      EXPECT_EQ(first(reduced[0]), sum);

      at::Tensor part = filled(rank, 10, rank + 1), whole = filled(rank, 10L * ranks, 0);
      all->_allgather_base(whole, part)->wait();
      for (int i = 0; i < ranks; ++i) EXPECT_EQ(whole.cpu()[10L * i + 9].item<double>(), i + 1);

      all->_reduce_scatter_base(part, whole)->wait();
      EXPECT_EQ(first(part), ranks * (rank + 1));

      Tensors broadcast{filled(rank, 10, rank)};
      c10d::BroadcastOptions options;
      options.rootRank = ranks - 1;
      all->broadcast(broadcast, options)->wait();
      EXPECT_EQ(first(broadcast[0]), ranks - 1);
    });
  }
}

TEST_F(Nccl, ReportsARankThatIsMissing) {
  on_ranks(1, [this](int /*rank*/) {
    store_->setTimeout(50ms);
    const std::string message = message_of<std::runtime_error>([this] { group("edge", 0, 2); });
    EXPECT_TRUE(message.starts_with("NCCL cannot connect rank 0 of 2 on cuda:0: ")) << message;
    EXPECT_NE(message.find("\n  Hint: "), std::string::npos) << message;
  });
}

TEST_F(Nccl, ReportsTwoRanksOnOneDevice) {
  on_ranks(1, [this](int /*rank*/) {
    on_threads(2, [this](int rank) {
      const std::string message = message_of<std::runtime_error>([&] { group("edge", rank, 2, 0); });
      EXPECT_TRUE(message.starts_with("NCCL cannot connect rank " + std::to_string(rank) + " of 2 on cuda:0: "))
          << message;
      EXPECT_NE(message.find("Each rank of a group needs a GPU of its own."), std::string::npos) << message;
    });
  });
}

TEST_F(Nccl, ReportsADeviceThatDoesNotExist) {
  const int count = static_cast<int>(at::accelerator::deviceCount());
  const std::string expected = "there is no device cuda:" + std::to_string(count) + ": CUDA finds " +
                               std::to_string(count) + (count == 1 ? " device" : " devices") +
                               ", numbered from 0.\n  Hint: CUDA_VISIBLE_DEVICES may hide devices.";
  EXPECT_EQ(message_of<std::runtime_error>([&] { group("edge", 0, 1, count); }), expected);
  const DeviceBackends backends = device_backends(cuda(count));
  EXPECT_FALSE(backends.create);
  EXPECT_EQ(backends.reason, expected);
}

TEST_F(Nccl, IdentifiesDevicesByTheirPciAddresses) {
  const std::string id = device_backends(cuda(0)).device_id;
  EXPECT_TRUE(std::regex_search(id, std::regex("/cuda/[0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\\.[0-9a-fA-F]$")))
      << id;
  EXPECT_EQ(device_backends(cuda(0)).device_id, id);
  if (at::accelerator::deviceCount() > 1) {
    EXPECT_NE(device_backends(cuda(1)).device_id, id);
  }
}

TEST(NcclWithoutGpus, IsExplained) {
  if (at::hasCUDA()) GTEST_SKIP() << "there are devices";
  const DeviceBackends backends = device_backends(at::kCUDA);
  EXPECT_FALSE(backends.create);
  EXPECT_EQ(backends.reason,
            "CUDA finds no GPU.\n"
            "  Hint: `nvidia-smi` lists GPUs and tests the driver; CUDA_VISIBLE_DEVICES may hide them.");
}

TEST_F(Nccl, ReportsALibraryThatIsTooOld) {
  if (std::getenv("CUDA_STANDIN_NCCL_VERSION") == nullptr) GTEST_SKIP() << "CUDA_STANDIN_NCCL_VERSION is not set";
  const std::string message = message_of<std::runtime_error>([this] { group("edge", 0, 1); });
  EXPECT_TRUE(message.starts_with("libnccl.so is NCCL 2.10.3, and libtorch_cuda.so needs NCCL 2.")) << message;
  EXPECT_TRUE(message.ends_with(" or later.\n  Hint: remove the older libnccl.so from LD_LIBRARY_PATH and LD_PRELOAD."))
      << message;
}

// Run as two process ranks by penstock_launch.
TEST_F(Nccl, ConnectsProcesses) {
  if (std::getenv("RANK") == nullptr) GTEST_SKIP() << "this process is not a rank";
  const Rendezvous found = rendezvous();
  if (at::accelerator::deviceCount() < found.ranks) GTEST_SKIP() << "there are too few devices";
  store_ = found.store;
  const c10::DeviceGuard guard(cuda(found.rank));
  const Backend all = group("all", found.rank, found.ranks, found.rank);
  const int next = (found.rank + 1) % found.ranks;
  const int previous = (found.rank + found.ranks - 1) % found.ranks;
  Tensors sent{filled(found.rank, 100'000, found.rank)}, received{filled(found.rank, 100'000, -1)};
  all->startCoalescing();
  all->recv(received, previous, 0);
  all->send(sent, next, 0);
  all->endCoalescing()->wait();
  EXPECT_EQ(first(received[0]), previous);
  Tensors sum{filled(found.rank, 1000, 1)};
  all->allreduce(sum)->wait();
  EXPECT_EQ(first(sum[0]), found.ranks);
}

}  // namespace
}  // namespace penstock::internal::testing
