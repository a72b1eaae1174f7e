#include "penstock/transport/membership.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {
namespace {

using std::chrono::milliseconds;

// Intervals at which the store is polled. Ranks of one machine are mostly found at the first attempt.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// Time until the first line of WaitingLines, which is earlier with a short timeout, and between later ones.
constexpr milliseconds kEarliestLine{100};
constexpr milliseconds kFirstLine = std::chrono::seconds(2);
constexpr milliseconds kBetweenLines = std::chrono::seconds(10);
// Rank 0 serves the store, so it gives the other ranks this long to read why the handshake failed.
constexpr milliseconds kLinger = std::chrono::seconds(1);
// Minimum time for the proofs once all ranks have connected.
constexpr milliseconds kProving = std::chrono::seconds(10);
constexpr const char* kFailure = "failure";
// Key of the fingerprint of rank 0's token, in the part of the store that all jobs share.
constexpr const char* kJob = "job";

std::string member_key(int rank) {
  return concat("member/", rank);
}
std::string informed_key(int rank) {
  return concat("informed/", rank);
}

std::string proof_key(int rank) {
  return concat("proof/", rank);
}
// Set by a process that is refused, in the part of the store that all jobs share.
std::string refused_key(int rank) {
  return concat("refused/", rank);
}

TransportError decode_failure(const std::string& bytes) {
  const std::vector<std::string> texts = split_texts(bytes);
  return {static_cast<TransportError::Why>(std::stoi(texts.at(0))), std::stoi(texts.at(1)), texts.at(2)};
}

// Returns "rank 1" or "ranks 1, 2", with at most eight of them.
std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  const auto shown = std::span(ranks).first(std::min(ranks.size(), kMost));
  return concat(ranks.size() == 1 ? "rank " : "ranks ", join(shown), ranks.size() > kMost ? ", …" : "");
}

// Publishes the values of one rank, waits for those of the others and checks them.
class Handshake {
 public:
  Handshake(const c10::intrusive_ptr<c10d::Store>& common, const Membership& self)
      : common_(common),
        self_(self),
        deadline_(deadline_after(self.timeout)),
        fingerprint_(self.token.sign(std::array<std::string, 1>{"fingerprint"})) {
    const auto jobs = c10::make_intrusive<c10d::PrefixStore>("job/" + fingerprint_, common);
    // Each rank counts its handshakes; all ranks make equally many.
    const std::int64_t number = jobs->add("handshakes/" + std::to_string(self.rank), 1);
    handshake_store_ = c10::make_intrusive<c10d::PrefixStore>(concat("handshake/", number), jobs);
    // The token depends on the number, so that values of one handshake are not valid in another.
    token_ = JobToken(self.token.sign(std::array<std::string, 2>{"handshake", std::to_string(number)}));
    store_ = signed_store("members", handshake_store_, token_);
  }

  c10::intrusive_ptr<c10d::Store> run() {
    publish();
    wait_for(member_key, [this] { require_same_job(); });
    const std::vector<std::string> members = read_members();
    require_same_options(members);
    pass_on_statements(members);
    std::vector<std::string> transcript{"transcript"};
    transcript.insert(transcript.end(), members.begin(), members.end());
    prove(transcript);
    transcript.front() = "session";
    return signed_store("session", handshake_store_, JobToken(token_.sign(transcript)));
  }

 private:
  // Publishes the value of this rank. Rank 0 also publishes which job the store belongs to.
  void publish() {
    if (self_.rank == 0) common_->set(kJob, fingerprint_);
    std::vector<std::string> texts{JobToken::random().secret(), self_.statement, "WORLD_SIZE",
                                   std::to_string(self_.ranks)};
    for (const auto& [name, value] : self_.agreed) {
      texts.push_back(name);
      texts.push_back(value);
    }
    published_ = join_texts(texts);
    store_->set(member_key(self_.rank), published_);
  }

  // Throws if the store belongs to another job, and tells the ranks of that job that a process was refused.
  void require_same_job() {
    if (self_.rank == 0 || !common_->check({kJob}) || common_->get_to_str(kJob) == fingerprint_) return;
    common_->set(refused_key(self_.rank), std::string());
    throw TransportError(
        TransportError::Why::Aborted, /*peer=*/0,
        concat("rank ", self_.rank,
               " has another job token than rank 0 at MASTER_ADDR:MASTER_PORT, which belongs to another "
               "job.\n  Hint: give all ranks of a job the same PENSTOCK_JOB_TOKEN, and each job a "
               "MASTER_PORT of its own."));
  }

  // Blocks until the keys of all ranks are in the store. Calls `check` each time it polls.
  void wait_for(std::string (*key)(int rank), const std::function<void()>& check) {
    WaitingLines lines(self_.on_waiting, self_.timeout);
    std::vector<std::string> keys;
    for (int rank = 0; rank < self_.ranks; ++rank) keys.push_back(key(rank));
    for (milliseconds pause = kFirstPause; !store_->check(keys); pause = std::min(pause * 2, kLongestPause)) {
      if (const auto failure = published_failure()) fail(decode_failure(*failure));
      check();
      if (Clock::now() >= deadline_) {
        const std::vector<int> missing = missing_of(keys);
        if (missing.empty()) return;
        fail({TransportError::Why::Timeout, missing.front(),
              concat(ranks_text(missing), " of ", self_.ranks, missing.size() == 1 ? " has" : " have",
                     " not connected within ", seconds_text(self_.timeout), ".", refused_text(missing, "\n  ", "."),
                     "\n  Hint: start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise the "
                     "timeout.")});
      }
      lines.waiting([&] {
        const std::vector<int> missing = missing_of(keys);
        return concat("rank ", self_.rank, " waits for ", ranks_text(missing), " of ", self_.ranks,
                      refused_text(missing, "; ", ""));
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

  // Returns which missing ranks a process of another job has claimed to be, or an empty text.
  std::string refused_text(const std::vector<int>& missing, const std::string& before, const std::string& after) {
    std::vector<int> refused;
    for (const int rank : missing) {
      if (common_->check({refused_key(rank)})) refused.push_back(rank);
    }
    if (refused.empty()) return "";
    return concat(before, "a process with another job token was refused as ", ranks_text(refused), after);
  }

  std::vector<std::string> read_members() {
    std::vector<std::string> members;
    for (int rank = 0; rank < self_.ranks; ++rank) {
      members.push_back(read(rank, member_key(rank)));
    }
    // The nonce of this rank is what makes the transcript, and so the proofs of the others, fresh.
    if (members[static_cast<std::size_t>(self_.rank)] != published_) fail(unproven(self_.rank));
    return members;
  }

  // Returns a published value. Fails if it was not signed with the token.
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
    } catch (const UnsignedValueError&) {  // NOLINT(bugprone-empty-catch): not written by this job
    }
    return std::nullopt;
  }

  static TransportError unproven(int rank) {
    return {
        TransportError::Why::Aborted, rank,
        concat("rank ", rank,
               " cannot prove that it knows the job token: its values in the store were written by another process, "
               "or in an earlier run.\n  Hint: let only the hosts of the job reach MASTER_PORT.")};
  }

  void require_same_options(const std::vector<std::string>& members) {
    std::vector<RankOptions> by_rank;
    for (const std::string& member : members) {
      const std::vector<std::string> texts = split_texts(member);
      RankOptions& options = by_rank.emplace_back();
      // The first texts are the rank's nonce and its statement.
      for (std::size_t i = 2; i + 1 < texts.size(); i += 2) options[texts[i]] = texts[i + 1];
    }
    if (const auto difference = difference_between(by_rank)) {
      fail({TransportError::Why::Aborted, difference->rank, difference->message});
    }
  }

  void pass_on_statements(const std::vector<std::string>& members) {
    if (!self_.on_statements) return;
    std::vector<std::string> statements;
    for (const std::string& member : members) statements.push_back(split_texts(member).at(1));
    try {
      self_.on_statements(statements);
    } catch (const TransportError& error) {
      fail(error);
    }
  }

  // Signs the transcript of all published values, and verifies the signatures of the other ranks.
  void prove(const std::vector<std::string>& transcript) {
    const JobToken transcript_token(token_.sign(transcript));
    const auto texts_of = [](int rank) { return std::array<std::string, 2>{"proof", std::to_string(rank)}; };
    store_->set(proof_key(self_.rank), transcript_token.sign(texts_of(self_.rank)));
    // The last rank may have connected just before the deadline.
    deadline_ = std::max<Deadline>(deadline_, deadline_after(kProving));
    wait_for(proof_key, [] {});
    if (const auto failure = published_failure()) fail(decode_failure(*failure));
    for (int rank = 0; rank < self_.ranks; ++rank) {
      if (!transcript_token.verifies(texts_of(rank), read(rank, proof_key(rank)))) fail(unproven(rank));
    }
  }

  // Publishes a failure and throws it. If another rank has published one before, throws that one: all ranks throw the
  // same.
  [[noreturn]] void fail(const TransportError& failure) {
    const std::array<std::string, 3> texts{std::to_string(static_cast<int>(failure.why())),
                                           std::to_string(failure.peer()), failure.what()};
    std::string first = join_texts(texts);
    try {
      first = store_->compareSet(kFailure, std::string(), first);
    } catch (const UnsignedValueError&) {
      store_->set(kFailure, first);
    }
    store_->set(informed_key(self_.rank), std::string());
    if (self_.rank == 0) {
      std::vector<std::string> informed;
      for (int rank = 1; rank < self_.ranks; ++rank) {
        if (store_->check({member_key(rank)})) informed.push_back(informed_key(rank));
      }
      const Deadline deadline = deadline_after(kLinger);
      while (!informed.empty() && !store_->check(informed) && Clock::now() < deadline) {
        std::this_thread::sleep_for(kFirstPause);
      }
    }
    throw decode_failure(first);
  }

  // The part of the store that processes of all jobs share.
  c10::intrusive_ptr<c10d::Store> common_;
  // Belongs to the caller of require_all_ranks().
  const Membership& self_;
  Deadline deadline_;
  // The value that this rank has published.
  std::string published_;
  // Identifies the token without revealing it.
  std::string fingerprint_;
  // Token of this handshake.
  JobToken token_;
  // The part of the store for this handshake, and the signed part below it.
  c10::intrusive_ptr<c10d::Store> handshake_store_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> require_all_ranks(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const Membership& self) {
  try {
    return Handshake(store, self).run();
  } catch (const c10::Error& error) {
    const std::string what = reason_of(error);
    throw TransportError(TransportError::Why::PeerLost, TransportError::kNoPeer,
                         concat("rank ", self.rank,
                                " lost the connection to the store while it waited for the other "
                                "ranks: ",
                                what.substr(0, what.find('\n'))));
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
  on_waiting_(concat(what(), " (", seconds_text(waited), " of ", seconds_text(timeout_), ")"));
}

}  // namespace penstock::internal
