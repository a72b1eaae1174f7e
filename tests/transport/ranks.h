// Worlds of ranks for tests: each rank runs on a thread of the test, over either transport.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "penstock/transport/block_pool.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/c10d_transport.h"
#include "penstock/transport/threads.h"
#include "penstock/transport/transport.h"

namespace penstock::internal::testing {

enum class Carrier { Threads, Gloo };

inline std::string name_of(Carrier carrier) {
  return carrier == Carrier::Threads ? "threads" : "gloo";
}

// A deadline far beyond the duration of any test, so that reaching it is a failure.
inline Deadline far() {
  return Clock::now() + std::chrono::seconds(120);
}
inline Deadline soon() {
  return Clock::now() + std::chrono::milliseconds(50);
}

template <class Act>
void on_threads(int count, const Act& act) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) threads.emplace_back([&act, i] { act(i); });
  for (std::thread& thread : threads) thread.join();
}

// The transports of all ranks. With Gloo, each rank has its own connections although the ranks are threads.
class World {
 public:
  // `pool` is where the ranks receive tensors with Gloo; if null, each rank has its own.
  World(Carrier carrier, int ranks, const C10dOptions& options = {},
        const std::shared_ptr<internal::BlockPool>& pool = nullptr) {
    if (carrier == Carrier::Threads) {
      transports_ = thread_transports(ranks);
      return;
    }
    transports_.resize(static_cast<std::size_t>(ranks));
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_threads(ranks, [&](int rank) {
      try {
        transports_[static_cast<std::size_t>(rank)] =
            pool ? internal::c10d_transport_with_pool(store, rank, ranks, options, pool)
                 : c10d_transport(store, rank, ranks, options);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }

  // The ranks leave at the same time, as processes do.
  ~World() {
    on_threads(ranks(), [this](int rank) { leave(rank); });
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int ranks() const { return static_cast<int>(transports_.size()); }
  Transport& operator[](int rank) { return *transports_[static_cast<std::size_t>(rank)]; }
  void leave(int rank) { transports_[static_cast<std::size_t>(rank)].reset(); }

  // Calls act(transport) for each rank on a thread of its own. If a rank throws, the waits of the others end and the
  // test fails.
  void run(const std::function<void(Transport&)>& act) {
    for (const std::string& error : errors(act)) EXPECT_EQ(error, "");
  }

  // Does the same, and returns the errors by rank instead of failing; empty for a rank that has not thrown.
  std::vector<std::string> errors(const std::function<void(Transport&)>& act) {
    std::vector<std::string> found(transports_.size());
    on_threads(ranks(), [&](int rank) {
      try {
        act((*this)[rank]);
      } catch (const std::exception& error) {
        found[static_cast<std::size_t>(rank)] = error.what();
        (*this)[rank].abort("rank " + std::to_string(rank) + " has failed");
      }
    });
    return found;
  }

 private:
  std::vector<std::unique_ptr<Transport>> transports_;
};

// A transport and a number of ranks.
struct WorldCase {
  Carrier carrier;
  int ranks;
};
inline void PrintTo(const WorldCase& world, std::ostream* out) {
  *out << name_of(world.carrier) << " " << world.ranks;
}
inline std::string case_name(const ::testing::TestParamInfo<WorldCase>& world) {
  return name_of(world.param.carrier) + "_" + std::to_string(world.param.ranks);
}
inline std::vector<WorldCase> worlds(int fewest_ranks) {
  std::vector<WorldCase> cases;
  for (const Carrier carrier : {Carrier::Threads, Carrier::Gloo}) {
    for (int ranks = fewest_ranks; ranks <= 4; ++ranks) cases.push_back({carrier, ranks});
  }
  return cases;
}

// The TransportError that a call has thrown, if any.
struct Thrown {
  bool threw = false;
  TransportError::Why why = TransportError::Why::Timeout;
  int peer = TransportError::kNoPeer;
  std::string what;
  friend bool operator==(const Thrown&, const Thrown&) = default;
};
inline void PrintTo(const Thrown& thrown, std::ostream* out) {
  constexpr const char* kNames[] = {"Timeout", "PeerLost", "Aborted"};
  *out << (thrown.threw ? kNames[static_cast<int>(thrown.why)] : "nothing") << ", peer " << thrown.peer << ": "
       << thrown.what;
}
template <class Act>
Thrown thrown_by(const Act& act) {
  try {
    act();
  } catch (const TransportError& error) {
    return {.threw = true, .why = error.why(), .peer = error.peer(), .what = error.what()};
  }
  return {};
}
inline Thrown timeout(int peer, const std::string& what) {
  return {.threw = true, .why = TransportError::Why::Timeout, .peer = peer, .what = what};
}
inline Thrown peer_lost(int peer, const std::string& what) {
  return {.threw = true, .why = TransportError::Why::PeerLost, .peer = peer, .what = what};
}
inline Thrown aborted(const std::string& what) {
  return {.threw = true, .why = TransportError::Why::Aborted, .peer = TransportError::kNoPeer, .what = what};
}

}  // namespace penstock::internal::testing
