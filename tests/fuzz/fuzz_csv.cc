// Fuzzes the CSV reader: any text is a schedule or an error. The text of a schedule reads as the same schedule; a valid
// schedule lowers to a valid one, and its simulation completes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"

namespace penstock::internal::testing {
namespace {

void try_text(std::string_view text) {
  const Schedule schedule = parse_csv(text);
  if (parse_csv(to_csv(schedule)) != schedule) std::abort();
  const auto violation = verify(schedule);
  if (violation && explain(schedule, *violation).empty()) std::abort();
  // An invalid schedule must be refused with an error.
  for (const auto act : {+[](const Schedule& s) { simulate(s); }, +[](const Schedule& s) { add_sharding(s); },
                         +[](const Schedule& s) { add_reductions(s); }, +[](const Schedule& s) { drop_backwards(s); },
                         +[](const Schedule& s) { add_communication(s); }}) {
    try {
      act(schedule);
    } catch (const ScheduleError&) {
      continue;
    }
  }
  if (violation || features_of(schedule).communication) return;
  const Schedule lowered = lower(schedule);
  if (verify(lowered)) std::abort();
  simulate(lowered);
}

}  // namespace
}  // namespace penstock::internal::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    penstock::internal::testing::try_text({reinterpret_cast<const char*>(data), size});
  } catch (const penstock::ScheduleError&) {
    return 0;
  }
  return 0;
}
