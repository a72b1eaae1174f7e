#include "penstock/program/reader/json.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>

#include "penstock/program/error.h"
#include "penstock/schedule/json.h"

namespace penstock::internal {
namespace {

// What an exporter calls numbers that need not be whole.
constexpr std::string_view kFloats[] = {"as_float", "as_floats", "as_float_lists", "real", "imag"};

// Looks at what is parsed, while it is. Whoever takes a number that no integer can hold for an integer has something
// undefined, so such numbers stand where the schema has floats, and nowhere else.
class Check {
 public:
  explicit Check(const std::string& where) : where_(where) {}

  void operator()(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    const auto at = static_cast<std::size_t>(depth);
    if (event == Event::key)
      floats_[at] = std::ranges::find(kFloats, parsed.get_ref<const std::string&>()) != std::end(kFloats);
    if (event == Event::array_start) floats_[at + 1] = floats_[at];
    if (event == Event::object_start) floats_[at + 1] = false;
    if (event == Event::value && parsed.is_number_float() && !floats_[at]) require_whole(parsed.get<double>());
  }

 private:
  void require_whole(double number) const {
    constexpr double kEnd = 0x1p63;
    if (number >= -kEnd && number < kEnd) return;
    std::ostringstream text;
    text << where_ << ": has the number " << number << " where a whole number of 64 bits should stand.";
    throw ProgramError(text.str());
  }

  const std::string& where_;
  // By depth: whether a number there belongs to one of those.
  std::array<bool, kDeepestJson + 2> floats_ = {};
};

}  // namespace

nlohmann::json parse_exported_json(std::string_view text, const std::string& where) {
  try {
    return parse_json(text, Check(where));
  } catch (const JsonError& error) {
    throw ProgramError(where + ": " + error.what());
  }
}

}  // namespace penstock::internal
