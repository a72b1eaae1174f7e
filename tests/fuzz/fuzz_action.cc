// Fuzzes the action parser: any text is an action or an error, and the text of an action parses to the same action.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "penstock/schedule/action.h"
#include "penstock/schedule/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const penstock::Action action = penstock::parse_action(text);
    if (penstock::parse_action(to_string(action)) != action) std::abort();
  } catch (const penstock::ScheduleError&) {
    return 0;
  }
  return 0;
}
