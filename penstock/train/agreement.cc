#include "penstock/train/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "penstock/tensor/reason.h"

namespace penstock {
namespace {

// Number of differences that a message has at most.
constexpr std::size_t kMostDifferences = 10;

std::string value_in(const std::map<std::string, std::string>& options, const std::string& name) {
  const auto found = options.find(name);
  return found == options.end() ? "not given" : found->second;
}

}  // namespace

Agreement::Agreement(Transport* transport, std::chrono::milliseconds timeout) : timeout_(timeout) {
  if (transport == nullptr) return;
  std::vector<int> all(static_cast<std::size_t>(transport->ranks()));
  std::iota(all.begin(), all.end(), 0);
  everyone_ = transport->group(all);
}

std::vector<std::string> Agreement::gather(const std::string& text) const {
  const Deadline deadline = Clock::now() + timeout_;
  const at::Tensor sizes = at::zeros({everyone_->size()}, at::kLong);
  sizes[everyone_->member()] = static_cast<std::int64_t>(text.size());
  everyone_->all_reduce({sizes})->wait(deadline);
  std::vector<std::string> texts(static_cast<std::size_t>(everyone_->size()));
  for (int rank = 0; rank < everyone_->size(); ++rank) {
    const auto size = sizes[rank].item<std::int64_t>();
    if (size == 0) continue;
    const at::Tensor bytes = at::empty({size}, at::kByte);
    if (rank == everyone_->member()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
    everyone_->broadcast({bytes}, rank)->wait(deadline);
    texts[static_cast<std::size_t>(rank)].assign(static_cast<const char*>(bytes.const_data_ptr()),
                                                 static_cast<std::size_t>(size));
  }
  return texts;
}

void Agreement::fail_together(const std::function<void()>& act) const {
  if (everyone_ == nullptr) return act();
  std::exception_ptr failure;
  std::string message;
  try {
    act();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    message = reason_of(error);
    if (message.empty()) message = "an error without a message";
  }
  std::vector<std::string> messages;
  try {
    messages = gather(message);
  } catch (const TransportError&) {
    // What happened here says more than that another rank did not hear of it.
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    if (!messages[rank].empty()) throw AgreementError("rank " + std::to_string(rank) + ": " + messages[rank]);
  }
}

void Agreement::require_same_options(const std::map<std::string, std::string>& options) const {
  if (everyone_ == nullptr) return;
  using nlohmann::json;
  std::vector<std::map<std::string, std::string>> by_rank;
  for (const std::string& text : gather(json(options).dump())) {
    by_rank.push_back(json::parse(text).get<std::map<std::string, std::string>>());
  }
  std::vector<std::string> differences;
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    std::set<std::string> names;
    for (const auto& [name, value] : by_rank.front()) names.insert(name);
    for (const auto& [name, value] : by_rank[rank]) names.insert(name);
    for (const std::string& name : names) {
      const std::string first = value_in(by_rank.front(), name);
      const std::string other = value_in(by_rank[rank], name);
      if (first == other) continue;
      differences.push_back("\n  " + name + ": " + other + " on rank " + std::to_string(rank) + ", " + first +
                            " on rank 0");
    }
  }
  if (differences.empty()) return;
  std::string message = "the ranks have different options.";
  for (std::size_t i = 0; i < std::min(differences.size(), kMostDifferences); ++i) message += differences[i];
  if (differences.size() > kMostDifferences) {
    message += "\n  … and " + std::to_string(differences.size() - kMostDifferences) + " more";
  }
  throw AgreementError(message + "\n  Hint: start all ranks with the same command line and configuration file.");
}

}  // namespace penstock
