// The messages of a record: when each was sent, and when the computation that needed it had it.
#pragma once

#include <cstdint>
#include <functional>

#include "penstock/runtime/record.h"

namespace penstock::internal {

inline constexpr double kMillisecond = 1e6;

// Returns when a computation worked, in milliseconds: it waits first.
inline Span working_span(const ActionRecord& record) {
  return {.start = static_cast<double>(record.start + record.waited) / kMillisecond,
          .end = static_cast<double>(record.end) / kMillisecond};
}

struct Received {
  int from = 0;
  int to = 0;
  std::int64_t bytes = 0;
  // When the send began, by the sender's clock.
  std::int64_t sent = 0;
  // When the computation that needs it asked for its inputs, and when it had them, by the receiver's clock.
  std::int64_t asked = 0;
  std::int64_t taken = 0;
};

// Calls visit(received) for each message between two ranks that the record has both ends of. Of a computation with several
// messages only the one that was sent last is visited: it is known when all of them were there, and not when each was.
void for_each_receive(const Schedule& schedule, const Record& record,
                      const std::function<void(const Received&)>& visit);

}  // namespace penstock::internal
