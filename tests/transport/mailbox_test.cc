// Tests of Monitor, Mailbox, CollectiveRound and DeadlineTimer. None of them needs libtorch, so that ThreadSanitizer
// sees all of their code.
#include "penstock/transport/mailbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/transport/collective_round.h"
#include "penstock/transport/deadline_timer.h"
#include "penstock/transport/monitor.h"

namespace penstock::internal::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace): made for it

constexpr Mailbox<int>::Key kKey = 7;

// A deadline far beyond the duration of any test: a lost wake-up fails a test instead of blocking it for ever.
Deadline far() {
  return Clock::now() + 120s;
}
Deadline past() {
  return Clock::now() - 1s;
}

std::uint64_t seed() {
  const char* words = std::getenv("PENSTOCK_SEED");
  return words == nullptr ? 1 : std::strtoull(words, nullptr, 10);
}

// Calls act(i) on `count` threads at once, and returns when all have returned.
template <class Act>
void on_threads(std::size_t count, const Act& act) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&act, i] { act(i); });
  for (std::thread& thread : threads) thread.join();
}

TEST(Monitor, TimesOutAtOnceWhenTheDeadlineHasPassed) {
  Monitor monitor(0us);
  MonitorLock lock(monitor);
  EXPECT_EQ(monitor.wait(past(), [] { return false; }), WaitResult::Timeout);
  // The waiter holds the lock again.
  on_threads(1, [&](std::size_t) { EXPECT_FALSE(monitor.try_lock()); });
}

TEST(Monitor, IsReadyAfterTheDeadlineWhenTheConditionHolds) {
  Monitor monitor(50us);
  MonitorLock lock(monitor);
  EXPECT_EQ(monitor.wait(past(), [] { return true; }), WaitResult::Ready);
}

TEST(Monitor, IsReadyAlthoughClosedWhenTheConditionHolds) {
  Monitor monitor(0us);
  monitor.close();
  MonitorLock lock(monitor);
  EXPECT_EQ(monitor.wait(far(), [] { return true; }), WaitResult::Ready);
  EXPECT_EQ(monitor.wait(far(), [] { return false; }), WaitResult::Closed);
}

// Waiters sleep at once, after a short spin, or mostly spin.
class SpinTime : public ::testing::TestWithParam<Clock::duration> {};
INSTANTIATE_TEST_SUITE_P(Monitor, SpinTime, ::testing::Values(0us, 2us, 50us), [](const auto& spin_time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(spin_time.param).count()) + "_us";
});

TEST_P(SpinTime, AMonitorEndsEveryWaitWhenItIsClosed) {
  Monitor monitor(GetParam());
  std::atomic<int> waiting = 0;
  std::vector<WaitResult> found(6, WaitResult::Ready);
  on_threads(found.size() + 1, [&](std::size_t i) {
    if (i == found.size()) {
      while (waiting < static_cast<int>(found.size())) std::this_thread::yield();
      monitor.close();
      return;
    }
    MonitorLock lock(monitor);
    ++waiting;
    found[i] = monitor.wait(far(), [] { return false; });
  });
  EXPECT_EQ(found, std::vector<WaitResult>(found.size(), WaitResult::Closed));
}

// A single lost wake-up fails this test, as no thread can continue before the one whose turn it is.
TEST_P(SpinTime, AMonitorLosesNoWakeUpOfThreadsThatTakeTurns) {
  constexpr std::size_t kThreads = 16;
  constexpr std::size_t kTurns = 600;
  Monitor monitor(GetParam());
  std::size_t turn = 0;
  std::atomic<int> lost = 0;
  on_threads(kThreads, [&](std::size_t i) {
    for (std::size_t next = i; next < kThreads * kTurns; next += kThreads) {
      MonitorLock lock(monitor);
      if (monitor.wait(far(), [&] { return turn == next; }) != WaitResult::Ready) {
        ++lost;
        monitor.notify_all();
        return;
      }
      ++turn;
      monitor.notify_all();
    }
  });
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(turn, kThreads * kTurns);
}

// As in RankThreads: one thread starts a round of work on all others, and waits for the last of them.
TEST_P(SpinTime, AMonitorLosesNoWakeUpOfRoundsOfWork) {
  constexpr std::size_t kThreads = 8;
  constexpr long kRounds = 1500;
  Monitor monitor(GetParam());
  long round = 0;
  std::size_t working = 0;
  long total_done = 0;
  std::atomic<int> lost = 0;
  on_threads(kThreads + 1, [&](std::size_t i) {
    if (i == kThreads) {
      for (long next = 1; next <= kRounds; ++next) {
        MonitorLock lock(monitor);
        working = kThreads;
        round = next;
        monitor.notify_all();
        if (monitor.wait(far(), [&] { return working == 0; }) != WaitResult::Ready) ++lost;
      }
      return;
    }
    for (long done = 0; done < kRounds; ++done) {
      MonitorLock lock(monitor);
      if (monitor.wait(Deadline::max(), [&] { return round > done; }) != WaitResult::Ready) ++lost;
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      ++total_done;
      if (--working == 0) monitor.notify_all();
    }
  });
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(total_done, kRounds * static_cast<long>(kThreads));
}

TEST(Mailbox, DeliversTheValuesOfAKeyInOrder) {
  Mailbox<std::string> box(0us);
  for (int i = 0; i < 3; ++i) box.open(kKey);
  for (const char* word : {"one", "two", "three"}) EXPECT_EQ(box.put(kKey, word, past()), WaitResult::Ready);
  std::vector<std::string> found(3);
  for (std::string& word : found) EXPECT_EQ(box.take(kKey, word, past()), WaitResult::Ready);
  EXPECT_EQ(found, (std::vector<std::string>{"one", "two", "three"}));
}

TEST(Mailbox, DeliversTheValuesOfTwoKeysInAnyOrder) {
  Mailbox<int> box(0us);
  for (const Mailbox<int>::Key key : {1, 2}) box.open(key);
  for (const int value : {1, 2}) box.put(static_cast<Mailbox<int>::Key>(value), value, past());
  int first = 0;
  int second = 0;
  EXPECT_EQ(box.take(2, second, past()), WaitResult::Ready);
  EXPECT_EQ(box.take(1, first, past()), WaitResult::Ready);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 2);
}

TEST(Mailbox, AcceptsNoValueForAKeyThatIsNotOpen) {
  Mailbox<int> box(0us);
  EXPECT_EQ(box.put(kKey, 1, past()), WaitResult::Timeout);
  box.open(kKey);
  EXPECT_EQ(box.put(kKey, 1, past()), WaitResult::Ready);
  EXPECT_EQ(box.put(kKey, 2, past()), WaitResult::Timeout);
}

TEST(Mailbox, TimesOutWithoutAValue) {
  Mailbox<int> box(0us);
  box.open(kKey);
  int value = 3;
  EXPECT_EQ(box.take(kKey, value, past()), WaitResult::Timeout);
  EXPECT_EQ(value, 3);
}

TEST(Mailbox, DeliversStoredValuesAlthoughClosed) {
  Mailbox<int> box(0us);
  box.open(kKey);
  box.put(kKey, 5, past());
  box.close();
  int value = 0;
  EXPECT_EQ(box.take(kKey, value, far()), WaitResult::Ready);
  EXPECT_EQ(value, 5);
  EXPECT_EQ(box.take(kKey, value, far()), WaitResult::Closed);
  EXPECT_EQ(box.put(kKey, 6, far()), WaitResult::Closed);
}

TEST(Mailbox, KeepsNoValueThatWasTaken) {
  Mailbox<std::shared_ptr<int>> box(0us);
  const auto value = std::make_shared<int>(1);
  for (int i = 0; i < 100; ++i) {
    box.open(kKey);
    box.put(kKey, value, past());
    std::shared_ptr<int> found;
    box.take(kKey, found, past());
  }
  EXPECT_EQ(value.use_count(), 1);
}

// Each rank sends to all others in a random order and takes in another, so that values are put both before and after
// their keys are opened.
TEST_P(SpinTime, MailboxesLoseNoValue) {
  constexpr std::size_t kRanks = 6;
  constexpr std::size_t kNumbers = 40;
  constexpr std::size_t kRounds = 12;
  std::cout << "PENSTOCK_SEED=" << seed() << "\n";
  std::vector<std::unique_ptr<Mailbox<std::size_t>>> boxes;
  for (std::size_t i = 0; i < kRanks; ++i) boxes.push_back(std::make_unique<Mailbox<std::size_t>>(GetParam()));
  std::atomic<int> wrong = 0;
  // Each rank has a sending and a receiving thread, so that sends do not wait for receives.
  on_threads(kRanks * 2, [&](std::size_t i) {
    const std::size_t rank = i / 2;
    std::mt19937_64 random(seed() * 1'000'003 + i);
    std::vector<std::size_t> order(kRanks * kNumbers);
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t round = 0; round < kRounds; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      if (i % 2 == 0) {
        for (const std::size_t index : order) {
          const std::size_t to = index / kNumbers;
          const Mailbox<std::size_t>::Key key = rank * kNumbers + index % kNumbers;
          if (boxes[to]->put(key, key * kRounds + round, far()) != WaitResult::Ready) ++wrong;
        }
        continue;
      }
      for (const std::size_t key : order) boxes[rank]->open(key);
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t key : order) {
        std::size_t value = 0;
        if (boxes[rank]->take(key, value, far()) != WaitResult::Ready || value != key * kRounds + round) ++wrong;
      }
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(SpinTime, AMailboxEndsAllWaitsWhenItIsClosed) {
  for (int round = 0; round < 50; ++round) {
    Mailbox<int> box(GetParam());
    std::vector<WaitResult> found(4, WaitResult::Ready);
    on_threads(found.size() + 1, [&](std::size_t i) {
      int value = 0;
      if (i == found.size()) {
        box.close();
      } else {
        found[i] = i % 2 == 0 ? box.put(i, 1, far()) : box.take(i, value, far());
      }
    });
    ASSERT_EQ(found, std::vector<WaitResult>(found.size(), WaitResult::Closed));
  }
}

int sum_of(const std::vector<int*>& all) {
  return std::accumulate(all.begin(), all.end(), 0, [](int sum, const int* one) { return sum + *one; });
}
void add_up(std::vector<int*>& all) {
  const int sum = sum_of(all);
  for (int* one : all) *one = sum;
}

TEST_P(SpinTime, CollectiveRoundsFollowEachOther) {
  constexpr std::size_t kMembers = 6;
  constexpr int kRounds = 1000;
  CollectiveRound<int*> rounds(kMembers, GetParam(), add_up);
  std::atomic<int> wrong = 0;
  on_threads(kMembers, [&](std::size_t member) {
    for (int round = 0; round < kRounds; ++round) {
      int value = static_cast<int>(member) + round;
      const std::uint64_t number = rounds.arrive(member, &value);
      if (rounds.wait(number, far()) != WaitResult::Ready || value != 15 + round * static_cast<int>(kMembers)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(CollectiveRound, LetsAMemberContinueBeforeTheOthersHaveArrived) {
  CollectiveRound<int*> rounds(2, 0us, add_up);
  int a = 1;
  int b = 2;
  int c = 10;
  int d = 20;
  const std::uint64_t first = rounds.arrive(0, &a);
  const std::uint64_t second = rounds.arrive(0, &b);
  EXPECT_EQ(rounds.wait(first, past()), WaitResult::Timeout);
  rounds.arrive(1, &c);
  EXPECT_EQ(rounds.wait(first, past()), WaitResult::Ready);
  EXPECT_EQ(rounds.wait(second, past()), WaitResult::Timeout);
  rounds.arrive(1, &d);
  EXPECT_EQ(rounds.wait(second, past()), WaitResult::Ready);
  EXPECT_EQ(a, 11);
  EXPECT_EQ(b, 22);
}

TEST(CollectiveRound, RethrowsAnErrorOnEveryMember) {
  CollectiveRound<int> rounds(3, 0us, [](std::vector<int>&) { throw std::runtime_error("sizes differ"); });
  // Kept until all threads have ended, as ThreadSanitizer does not see the reference count of exceptions.
  std::vector<std::exception_ptr> found(3);
  on_threads(3, [&](std::size_t member) {
    const std::uint64_t number = rounds.arrive(member, 0);
    try {
      rounds.wait(number, far());
    } catch (...) {
      found[member] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : found) {
    ASSERT_TRUE(error);
    try {
      std::rethrow_exception(error);
    } catch (const std::runtime_error& what) {
      EXPECT_STREQ(what.what(), "sizes differ");
    }
  }
}

TEST(CollectiveRound, EndsAllWaitsWhenItIsClosed) {
  CollectiveRound<int> rounds(2, 0us, [](std::vector<int>&) {});
  const std::uint64_t number = rounds.arrive(0, 0);
  on_threads(2, [&](std::size_t i) {
    if (i == 0) {
      rounds.close();
    } else {
      EXPECT_EQ(rounds.wait(number, far()), WaitResult::Closed);
    }
  });
}

// A wait without a deadline of its own, which ends when it is woken.
class Sleeper {
 public:
  // Returns true if it was woken.
  bool sleep() {
    MonitorLock lock(monitor_);
    return monitor_.wait(far(), [this] { return woken_; }) == WaitResult::Ready;
  }
  void wake() {
    const MonitorLock lock(monitor_);
    woken_ = true;
    monitor_.notify_all();
  }
  bool woken() {
    const MonitorLock lock(monitor_);
    return woken_;
  }

 private:
  Monitor monitor_{0us};
  bool woken_ = false;
};

TEST(DeadlineTimer, FiresAlarmsAtTheirDeadlines) {
  DeadlineTimer timer;
  // The second deadline is earlier than the one that the thread waits for.
  Sleeper later;
  Sleeper sooner;
  const DeadlineTimer::Alarm first(timer, far(), [&] { later.wake(); });
  const DeadlineTimer::Alarm second(timer, Clock::now() + 10ms, [&] { sooner.wake(); });
  EXPECT_TRUE(sooner.sleep());
  EXPECT_FALSE(later.woken());
}

TEST(DeadlineTimer, FiresAlarmsAtOnceWhenClosed) {
  DeadlineTimer timer;
  Sleeper before;
  Sleeper after;
  const DeadlineTimer::Alarm first(timer, Deadline::max(), [&] { before.wake(); });
  EXPECT_FALSE(before.woken());
  timer.close();
  EXPECT_TRUE(before.woken());
  const DeadlineTimer::Alarm second(timer, Deadline::max(), [&] { after.wake(); });
  EXPECT_TRUE(after.woken());
}

TEST(DeadlineTimer, DoesNotFireADestroyedAlarm) {
  DeadlineTimer timer;
  Sleeper cancelled;
  Sleeper other;
  {
    const DeadlineTimer::Alarm alarm(timer, Clock::now() + 5ms, [&] { cancelled.wake(); });
  }
  const DeadlineTimer::Alarm alarm(timer, Clock::now() + 10ms, [&] { other.wake(); });
  EXPECT_TRUE(other.sleep());
  timer.close();
  EXPECT_FALSE(cancelled.woken());
}

TEST(DeadlineTimer, FiresEachAlarmOnceForManyThreads) {
  DeadlineTimer timer;
  std::atomic<int> fired = 0;
  std::atomic<int> woken = 0;
  constexpr int kThreads = 8;
  constexpr int kWaits = 200;
  on_threads(kThreads, [&](std::size_t i) {
    for (int wait = 0; wait < kWaits; ++wait) {
      Sleeper sleeper;
      const DeadlineTimer::Alarm alarm(timer, Clock::now() + std::chrono::microseconds((i * 7 + 13) % 50 * 10), [&] {
        ++fired;
        sleeper.wake();
      });
      if (sleeper.sleep()) ++woken;
    }
  });
  EXPECT_EQ(fired, kThreads * kWaits);
  EXPECT_EQ(woken, kThreads * kWaits);
}

}  // namespace
}  // namespace penstock::internal::testing
