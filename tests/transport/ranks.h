// What the tests of this room share: the ranks of a world as threads of the test, whatever carries their messages.
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

#include "penstock/transport/c10d.h"
#include "penstock/transport/threads.h"
#include "penstock/transport/transport.h"

namespace penstock::testing {

enum class Carrier { Threads, Gloo };

inline std::string name_of(Carrier carrier) {
  return carrier == Carrier::Threads ? "threads" : "gloo";
}

// Far beyond what any test takes: whoever comes there has failed.
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

class World {
 public:
  World(Carrier carrier, int ranks, const C10dOptions& options = {}) {
    if (carrier == Carrier::Threads) {
      transports_ = thread_transports(ranks);
      return;
    }
    transports_.resize(static_cast<std::size_t>(ranks));
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_threads(ranks, [&](int rank) {
      try {
        transports_[static_cast<std::size_t>(rank)] = c10d_transport(store, rank, ranks, options);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }

  int ranks() const { return static_cast<int>(transports_.size()); }
  Transport& operator[](int rank) { return *transports_[static_cast<std::size_t>(rank)]; }
  void leave(int rank) { transports_[static_cast<std::size_t>(rank)].reset(); }

  // Calls act(transport) for each rank on a thread of its own. A rank that throws ends the waiting of the others, and
  // fails the test.
  void run(const std::function<void(Transport&)>& act) {
    for (const std::string& error : errors(act)) EXPECT_EQ(error, "");
  }

  // The same; what each rank has thrown, by rank, empty where nothing was.
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

// Which ranks, and how their messages are carried.
struct WorldCase {
  Carrier carrier;
  int ranks;
};
inline void PrintTo(const WorldCase& one, std::ostream* out) {
  *out << name_of(one.carrier) << " " << one.ranks;
}
inline std::string case_name(const ::testing::TestParamInfo<WorldCase>& one) {
  return name_of(one.param.carrier) + "_" + std::to_string(one.param.ranks);
}
inline std::vector<WorldCase> worlds(int fewest_ranks) {
  std::vector<WorldCase> cases;
  for (const Carrier carrier : {Carrier::Threads, Carrier::Gloo}) {
    for (int ranks = fewest_ranks; ranks <= 4; ++ranks) cases.push_back({carrier, ranks});
  }
  return cases;
}

struct Thrown {
  bool threw = false;
  TransportError::Why why = TransportError::Why::Timeout;
  int peer = TransportError::kNoPeer;
  std::string what;
  friend bool operator==(const Thrown&, const Thrown&) = default;
};
inline void PrintTo(const Thrown& one, std::ostream* out) {
  constexpr const char* kNames[] = {"Late", "Gone", "Aborted"};
  *out << (one.threw ? kNames[static_cast<int>(one.why)] : "nothing") << ", peer " << one.peer << ": " << one.what;
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
inline Thrown late(int peer, const std::string& what) {
  return {.threw = true, .why = TransportError::Why::Timeout, .peer = peer, .what = what};
}
inline Thrown gone(int peer, const std::string& what) {
  return {.threw = true, .why = TransportError::Why::PeerLost, .peer = peer, .what = what};
}
inline Thrown aborted(const std::string& what) {
  return {.threw = true, .why = TransportError::Why::Aborted, .peer = TransportError::kNoPeer, .what = what};
}

}  // namespace penstock::testing
