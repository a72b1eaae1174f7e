#include "penstock/transport/membership.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {
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
// Ranks that have all connected have at least this long to prove that they know the token.
constexpr milliseconds kProving = std::chrono::seconds(10);
constexpr const char* kFailure = "failure";
// In the part of the store that all jobs see: whose it is.
constexpr const char* kJob = "job";

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}
std::string informed_key(int rank) {
  return "informed/" + std::to_string(rank);
}

std::string proof_key(int rank) {
  return "proof/" + std::to_string(rank);
}
// In the part of the store that all jobs see.
std::string refused_key(int rank) {
  return "refused/" + std::to_string(rank);
}

TransportError decode_failure(const std::string& bytes) {
  const std::vector<std::string> texts = split_texts(bytes);
  return {static_cast<TransportError::Why>(std::stoi(texts.at(0))), std::stoi(texts.at(1)), texts.at(2)};
}

std::string list_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  constexpr std::size_t kMost = 8;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text.append(i == 0 ? "" : ", ").append(std::to_string(ranks[i]));
  }
  return ranks.size() > kMost ? text + ", …" : text;
}

// Publishes one rank, waits for the others and checks what they have published.
class Handshake {
 public:
  Handshake(const c10::intrusive_ptr<c10d::Store>& common, const Membership& own)
      : common_(common),
        own_(own),
        deadline_(deadline_after(own.timeout)),
        fingerprint_(own.token.sign(std::array<std::string, 1>{"fingerprint"})) {
    const auto jobs = c10::make_intrusive<c10d::PrefixStore>("job/" + fingerprint_, common);
    // Each rank counts its own.
    const std::int64_t number = jobs->add("handshakes/" + std::to_string(own.rank), 1);
    place_ = c10::make_intrusive<c10d::PrefixStore>("handshake/" + std::to_string(number), jobs);
    // A value of one handshake is none of another.
    token_ = JobToken(own.token.sign(std::array<std::string, 2>{"handshake", std::to_string(number)}));
    store_ = signed_store("members", place_, token_);
  }

  c10::intrusive_ptr<c10d::Store> run() {
    publish();
    wait_for(member_key, [this] { require_same_job(); });
    const std::vector<std::string> members = read_members();
    require_same_options(members);
    std::vector<std::string> transcript{"transcript"};
    transcript.insert(transcript.end(), members.begin(), members.end());
    prove(transcript);
    transcript.front() = "session";
    return signed_store("session", place_, JobToken(token_.sign(transcript)));
  }

 private:
  // Rank 0 says whose the store is.
  void publish() {
    if (own_.rank == 0) common_->set(kJob, fingerprint_);
    std::vector<std::string> texts{JobToken::random().secret(), "WORLD_SIZE", std::to_string(own_.ranks)};
    for (const auto& [name, value] : own_.agreed) {
      texts.push_back(name);
      texts.push_back(value);
    }
    published_ = join_texts(texts);
    store_->set(member_key(own_.rank), published_);
  }

  // Throws when the store is another job's. Whoever waits there for this rank learns that a wrong one has come.
  void require_same_job() {
    if (own_.rank == 0 || !common_->check({kJob}) || common_->get_to_str(kJob) == fingerprint_) return;
    common_->set(refused_key(own_.rank), std::string());
    const std::string rank = std::to_string(own_.rank);
    throw TransportError(TransportError::Why::Aborted, /*peer=*/0,
                         "rank " + rank +
                             " has another job token than rank 0 at MASTER_ADDR:MASTER_PORT, which belongs to another "
                             "job.\n  Hint: give all ranks of a job the same PENSTOCK_JOB_TOKEN, and each job a "
                             "MASTER_PORT of its own.");
  }

  // Blocks until a key of each rank is there, with a look at what else there is between.
  void wait_for(std::string (*key)(int rank), const std::function<void()>& look) {
    WaitingLines lines(own_.on_waiting, own_.timeout);
    std::vector<std::string> keys;
    for (int rank = 0; rank < own_.ranks; ++rank) keys.push_back(key(rank));
    for (milliseconds pause = kFirstPause; !store_->check(keys); pause = std::min(pause * 2, kLongestPause)) {
      if (const auto failure = published_failure()) fail(decode_failure(*failure));
      look();
      if (Clock::now() >= deadline_) {
        const std::vector<int> missing = missing_of(keys);
        if (missing.empty()) return;
        fail({TransportError::Why::Timeout, missing.front(),
              list_text(missing) + " of " + std::to_string(own_.ranks) + (missing.size() == 1 ? " has" : " have") +
                  " not connected within " + seconds_text(own_.timeout) + "." + refused_text(missing, "\n  ", ".") +
                  "\n  Hint: start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise the "
                  "timeout."});
      }
      lines.waiting([&] {
        const std::vector<int> missing = missing_of(keys);
        return "rank " + std::to_string(own_.rank) + " waits for " + list_text(missing) + " of " +
               std::to_string(own_.ranks) + refused_text(missing, "; ", "");
      });
      std::this_thread::sleep_for(
          std::min<Clock::duration>(pause, std::max<Clock::duration>(deadline_ - Clock::now(), {})));
    }
  }

  std::vector<int> missing_of(const std::vector<std::string>& keys) {
    std::vector<int> missing;
    for (std::size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store_->check({keys[rank]})) missing.push_back(static_cast<int>(rank));
    }
    return missing;
  }

  // Names those in whose place a process of another job has come.
  std::string refused_text(const std::vector<int>& missing, const std::string& before, const std::string& behind) {
    std::vector<int> refused;
    for (const int rank : missing) {
      if (common_->check({refused_key(rank)})) refused.push_back(rank);
    }
    if (refused.empty()) return "";
    return before + "a process with another job token has come as " + list_text(refused) + behind;
  }

  std::vector<std::string> read_members() {
    std::vector<std::string> members;
    for (int rank = 0; rank < own_.ranks; ++rank) {
      members.push_back(read(rank, member_key(rank)));
    }
    // The random number of this rank is what makes the proofs of others new.
    if (members[static_cast<std::size_t>(own_.rank)] != published_) fail(unproven(own_.rank));
    return members;
  }

  // Returns what a rank has published. Fails for a value that was not signed with the token.
  std::string read(int rank, const std::string& key) {
    try {
      return store_->get_to_str(key);
    } catch (const UnsignedValueError&) {
      fail(unproven(rank));
    }
  }

  // Returns the failure that a rank of this job has published, if there is one.
  std::optional<std::string> published_failure() {
    try {
      if (store_->check({kFailure})) return store_->get_to_str(kFailure);
    } catch (const UnsignedValueError&) {  // NOLINT(bugprone-empty-catch): it is a stranger's
    }
    return std::nullopt;
  }

  static TransportError unproven(int rank) {
    return {TransportError::Why::Aborted, rank,
            "rank " + std::to_string(rank) +
                " cannot prove that it knows the job token: a stranger has written to the store, or values of an "
                "earlier run.\n  Hint: let only the hosts of the job reach MASTER_PORT."};
  }

  void require_same_options(const std::vector<std::string>& members) {
    std::vector<RankOptions> by_rank;
    for (const std::string& member : members) {
      const std::vector<std::string> texts = split_texts(member);
      RankOptions& options = by_rank.emplace_back();
      // The first is the rank's random number.
      for (std::size_t i = 1; i + 1 < texts.size(); i += 2) options[texts[i]] = texts[i + 1];
    }
    if (const auto difference = difference_between(by_rank)) {
      fail({TransportError::Why::Aborted, difference->rank, difference->message});
    }
  }

  // Each rank signs what all have published, and looks at the signatures of the others.
  void prove(const std::vector<std::string>& transcript) {
    const JobToken transcript_token(token_.sign(transcript));
    const auto texts_of = [](int rank) { return std::array<std::string, 2>{"proof", std::to_string(rank)}; };
    store_->set(proof_key(own_.rank), transcript_token.sign(texts_of(own_.rank)));
    // The last rank may have come at the last moment, and proves itself at once.
    deadline_ = std::max<Deadline>(deadline_, deadline_after(kProving));
    wait_for(proof_key, [] {});
    if (const auto failure = published_failure()) fail(decode_failure(*failure));
    for (int rank = 0; rank < own_.ranks; ++rank) {
      if (!transcript_token.verifies(texts_of(rank), read(rank, proof_key(rank)))) fail(unproven(rank));
    }
  }

  // The first failure that a rank publishes is the one that all throw.
  [[noreturn]] void fail(const TransportError& failure) {
    const std::array<std::string, 3> texts{std::to_string(static_cast<int>(failure.why())),
                                           std::to_string(failure.peer()), failure.what()};
    std::string first = join_texts(texts);
    try {
      first = store_->compareSet(kFailure, std::string(), first);
    } catch (const UnsignedValueError&) {
      store_->set(kFailure, first);
    }
    store_->set(informed_key(own_.rank), std::string());
    if (own_.rank == 0) {
      std::vector<std::string> informed;
      for (int rank = 1; rank < own_.ranks; ++rank) {
        if (store_->check({member_key(rank)})) informed.push_back(informed_key(rank));
      }
      const Deadline deadline = deadline_after(kLinger);
      while (!informed.empty() && !store_->check(informed) && Clock::now() < deadline) {
        std::this_thread::sleep_for(kFirstPause);
      }
    }
    throw decode_failure(first);
  }

  // The part of the store that processes of all jobs use.
  c10::intrusive_ptr<c10d::Store> common_;
  const Membership& own_;
  Deadline deadline_;
  // The member value of this rank, as it was published.
  std::string published_;
  // Tells tokens apart without telling them.
  std::string fingerprint_;
  // The part that only ranks of this job use, and below it the signed one that this handshake uses.
  JobToken token_;
  c10::intrusive_ptr<c10d::Store> place_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> require_all_ranks(const c10::intrusive_ptr<c10d::Store>& store, const Membership& own) {
  try {
    return Handshake(store, own).run();
  } catch (const c10::Error& error) {
    const std::string what = reason_of(error);
    throw TransportError(TransportError::Why::PeerLost, TransportError::kNoPeer,
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

}  // namespace penstock::internal
