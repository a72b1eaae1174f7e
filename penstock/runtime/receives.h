// Messages of a record: when each was sent, and when the computation that needed it received it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

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

// Finds the sends of a record by their receives. Refers to the schedule and the record, which must outlive it.
class Sends {
 public:
  Sends(const Schedule& schedule, const Record& record);

  // Return the record of a send by its edge, direction and microbatch, or by its receive; null if the record has none.
  const ActionRecord* find(int edge, Direction direction, int microbatch) const {
    return sends_[index_of(edge, direction, microbatch)];
  }
  const ActionRecord* of(const Action& receive) const;

 private:
  std::size_t index_of(int edge, Direction direction, int microbatch) const;

  const Schedule& schedule_;
  std::vector<const ActionRecord*> sends_;
};

// Calls visit(message) for each message between two ranks of which the record has both. If a computation needs several
// messages, only the one that was sent last is visited: the record tells when all had arrived, not when each had.
void for_each_receive(const Schedule& schedule, const Record& record,
                      const std::function<void(const ReceivedMessage&)>& visit);

}  // namespace penstock::internal
