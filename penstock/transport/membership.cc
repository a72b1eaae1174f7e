#include "penstock/transport/membership.h"

#include <algorithm>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/tensor/reason.h"
#include "penstock/transport/gate.h"
#include "penstock/transport/transport.h"

namespace penstock {
namespace {

using std::chrono::milliseconds;

// Pauses between two looks at the store. Ranks of one machine are there at the first look most often.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// The first line while waiting, earlier with a short timeout, and those that follow.
constexpr milliseconds kEarliestLine{100};
constexpr milliseconds kFirstLine = std::chrono::seconds(2);
constexpr milliseconds kBetweenLines = std::chrono::seconds(10);
// Rank 0 serves the store: when it fails, it gives the others this long to read why.
constexpr milliseconds kLinger = std::chrono::seconds(1);
constexpr const char* kFailure = "failure";

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}
std::string informed_key(int rank) {
  return "informed/" + std::to_string(rank);
}

// Each text is preceded by its length.
std::string encode(const std::vector<std::string>& texts) {
  std::string bytes;
  for (const std::string& text : texts) bytes += std::to_string(text.size()) + ":" + text;
  return bytes;
}

std::vector<std::string> decode(std::string_view bytes) {
  std::vector<std::string> texts;
  while (!bytes.empty()) {
    const std::size_t colon = bytes.find(':');
    const std::size_t size = std::stoul(std::string(bytes.substr(0, colon)));
    texts.emplace_back(bytes.substr(colon + 1, size));
    bytes.remove_prefix(colon + 1 + size);
  }
  return texts;
}

RankOptions options_of(c10d::Store& store, int rank) {
  const std::vector<std::string> texts = decode(store.get_to_str(member_key(rank)));
  RankOptions options;
  for (std::size_t i = 0; i + 1 < texts.size(); i += 2) options[texts[i]] = texts[i + 1];
  return options;
}

TransportError decode_failure(const std::string& bytes) {
  const std::vector<std::string> texts = decode(bytes);
  return {static_cast<TransportError::Why>(std::stoi(texts.at(0))), std::stoi(texts.at(1)), texts.at(2)};
}

// The first failure that a rank publishes is the one that all throw.
[[noreturn]] void fail(c10d::Store& store, const Membership& own, const TransportError& failure) {
  const std::string bytes =
      encode({std::to_string(static_cast<int>(failure.why())), std::to_string(failure.peer()), failure.what()});
  const std::string first = store.compareSet(kFailure, std::string(), bytes);
  store.set(informed_key(own.rank), std::string());
  if (own.rank == 0) {
    std::vector<std::string> informed;
    for (int rank = 1; rank < own.ranks; ++rank) {
      if (store.check({member_key(rank)})) informed.push_back(informed_key(rank));
    }
    const Deadline deadline = deadline_after(kLinger);
    while (!informed.empty() && !store.check(informed) && Clock::now() < deadline) {
      std::this_thread::sleep_for(kFirstPause);
    }
  }
  throw decode_failure(first);
}

std::string list_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  constexpr std::size_t kMost = 8;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text.append(i == 0 ? "" : ", ").append(std::to_string(ranks[i]));
  }
  return ranks.size() > kMost ? text + ", …" : text;
}

std::vector<int> missing_ranks(c10d::Store& store, int ranks) {
  std::vector<int> missing;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!store.check({member_key(rank)})) missing.push_back(rank);
  }
  return missing;
}

void wait_for_members(c10d::Store& store, const Membership& own) {
  const Deadline deadline = deadline_after(own.timeout);
  WaitingLines lines(own.on_waiting, own.timeout);
  std::vector<std::string> keys;
  for (int rank = 0; rank < own.ranks; ++rank) keys.push_back(member_key(rank));
  for (milliseconds pause = kFirstPause; !store.check(keys); pause = std::min(pause * 2, kLongestPause)) {
    if (store.check({kFailure})) fail(store, own, decode_failure(store.get_to_str(kFailure)));
    if (Clock::now() >= deadline) {
      const std::vector<int> missing = missing_ranks(store, own.ranks);
      if (missing.empty()) return;
      fail(store, own,
           {TransportError::Why::Late, missing.front(),
            list_text(missing) + " of " + std::to_string(own.ranks) + (missing.size() == 1 ? " has" : " have") +
                " not connected within " + seconds_text(own.timeout) +
                ".\n  Hint: start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise the "
                "timeout."});
    }
    lines.waiting([&] {
      return "rank " + std::to_string(own.rank) + " waits for " + list_text(missing_ranks(store, own.ranks)) + " of " +
             std::to_string(own.ranks);
    });
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause, std::max<Clock::duration>(deadline - Clock::now(), {})));
  }
}

void require_same_options(c10d::Store& store, const Membership& own) {
  std::vector<RankOptions> by_rank;
  for (int rank = 0; rank < own.ranks; ++rank) by_rank.push_back(options_of(store, rank));
  if (const auto difference = difference_between(by_rank)) {
    fail(store, own, {TransportError::Why::Aborted, difference->rank, difference->message});
  }
}

}  // namespace

void require_all_ranks(c10d::Store& store, const Membership& own) {
  try {
    std::vector<std::string> texts{"WORLD_SIZE", std::to_string(own.ranks)};
    for (const auto& [name, value] : own.agreed) {
      texts.push_back(name);
      texts.push_back(value);
    }
    store.set(member_key(own.rank), encode(texts));
    wait_for_members(store, own);
    require_same_options(store, own);
  } catch (const c10::Error& error) {
    const std::string what = reason_of(error);
    throw TransportError(TransportError::Why::Gone, TransportError::kNobody,
                         "rank " + std::to_string(own.rank) +
                             " lost the connection to the store while it waited for the other ranks: " +
                             what.substr(0, what.find('\n')));
  }
}

std::string seconds_text(std::chrono::milliseconds time) {
  std::ostringstream text;
  text << std::chrono::duration<double>(time).count() << " s";
  return std::move(text).str();
}

WaitingLines::WaitingLines(WaitingFunction on_waiting, std::chrono::milliseconds timeout)
    : on_waiting_(std::move(on_waiting)),
      timeout_(bounded(timeout)),
      began_(Clock::now()),
      next_(began_ + std::clamp(timeout_ / 4, kEarliestLine, kFirstLine)) {}

void WaitingLines::waiting(const std::function<std::string()>& what) {
  const auto now = Clock::now();
  if (!on_waiting_ || now < next_) return;
  next_ = now + kBetweenLines;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - began_);
  on_waiting_(what() + " (" + seconds_text(waited) + " of " + seconds_text(timeout_) + ")");
}

}  // namespace penstock
