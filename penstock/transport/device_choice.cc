#include "penstock/transport/device_choice.h"

#include <array>
#include <cstddef>
#include <map>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/transport/job_token.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {
namespace {

constexpr const char* kPossible = "possible";

// Returns why the ranks cannot send tensors from device to device, or "".
std::string why_not_direct(const std::vector<std::string>& statements) {
  std::map<std::string, int> rank_of_device;
  for (std::size_t rank = 0; rank < statements.size(); ++rank) {
    const std::vector<std::string> texts = split_texts(statements[rank]);
    if (texts.at(0) != kPossible) return concat("rank ", rank, ": ", texts.at(1));
    if (texts.at(1).empty()) continue;
    const auto [known, is_new] = rank_of_device.emplace(texts.at(1), static_cast<int>(rank));
    if (is_new) continue;
    return concat(
        "ranks ", known->second, " and ", rank,
        " have the same device.\n  Hint: give each rank a device of its own, or stage tensors in CPU memory.");
  }
  return "";
}

}  // namespace

DeviceChoice::DeviceChoice(const DeviceBackends& backends, DeviceTransport asked) : asked_(asked) {
  std::array<std::string, 2> texts{kPossible, backends.device_id};
  if (!backends.create) {
    const bool has_reason = !backends.reason.empty();
    texts = {"impossible", has_reason ? backends.reason
                                      : "no device backends were given.\n  Hint: pass those of device_backends() on "
                                        "all ranks."};
  }
  statement_ = join_texts(texts);
}

std::string DeviceChoice::asked() const {
  switch (asked_) {
    case DeviceTransport::Auto: return "";
    case DeviceTransport::Direct: return "direct";
    case DeviceTransport::Staged: return "staged";
  }
  return "";
}

void DeviceChoice::choose(const std::vector<std::string>& statements) {
  if (asked_ == DeviceTransport::Staged) return;
  std::string why = why_not_direct(statements);
  if (why.empty()) {
    chosen_ = DeviceTransport::Direct;
  } else if (asked_ == DeviceTransport::Direct) {
    throw TransportError(TransportError::Why::Aborted, TransportError::kNoPeer,
                         concat("tensors cannot be sent from device to device: ", why));
  } else {
    reason_ = std::move(why);
  }
}

}  // namespace penstock::internal
