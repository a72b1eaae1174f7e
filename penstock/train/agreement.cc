#include "penstock/train/agreement.h"

#include <ATen/ATen.h>

#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <numeric>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/schedule/json.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {

Agreement::Agreement(Transport* transport, std::chrono::milliseconds timeout) : timeout_(timeout) {
  if (transport == nullptr) return;
  std::vector<int> all(static_cast<std::size_t>(transport->ranks()));
  std::iota(all.begin(), all.end(), 0);
  everyone_ = transport->group(all);
}

std::vector<std::string> Agreement::gather(const std::string& text) const {
  const Deadline deadline = deadline_after(timeout_);
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
    // The local failure says more than the failure to report it.
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    if (!messages[rank].empty()) throw AgreementError(concat("rank ", rank, ": ", messages[rank]));
  }
}

void Agreement::require_same_options(const RankOptions& options) const {
  if (everyone_ == nullptr) return;
  using nlohmann::json;
  std::vector<RankOptions> by_rank;
  for (const std::string& text : gather(json(options).dump())) by_rank.push_back(parse_json(text).get<RankOptions>());
  if (const auto difference = difference_between(by_rank)) throw AgreementError(difference->message);
}

}  // namespace penstock::internal
