// Messages of a record: when each was sent, and when the computation that needed it received it.
#pragma once

#include <cstdint>
#include <functional>

#include "penstock/runtime/record.h"

namespace penstock::internal {

inline constexpr double kMillisecond = 1e6;

// Returns the time span in which a computation ran, in milliseconds, without the time that it waited for its messages
// before.
inline Span working_span(const ActionRecord& record) {
  return {.start = static_cast<double>(record.start + record.waited) / kMillisecond,
          .end = static_cast<double>(record.end) / kMillisecond};
}

struct ReceivedMessage {
  int from = 0;
  int to = 0;
  std::int64_t bytes = 0;
  // Time at which the send began, by the sender's clock.
  std::int64_t sent = 0;
  // Times at which the computation that needs it began to wait for its inputs, and at which it had them, by the
  // receiver's clock.
  std::int64_t awaited = 0;
  std::int64_t received = 0;
};

// Calls visit(message) for each message between two ranks of which the record has both. If a computation needs several
// messages, only the one that was sent last is visited: the record tells when all had arrived, not when each had.
void for_each_receive(const Schedule& schedule, const Record& record,
                      const std::function<void(const ReceivedMessage&)>& visit);

}  // namespace penstock::internal
