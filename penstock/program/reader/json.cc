#include "penstock/program/reader/json.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/schedule/json.h"

namespace penstock::internal {
namespace {

// Keys whose numbers are floats. All other numbers of the schema are integers.
constexpr std::string_view kFloats[] = {"as_float", "as_floats", "as_float_lists", "real", "imag"};

// Checks numbers while they are parsed. The conversion of a number beyond 64 bits to an integer is undefined, so such
// numbers are allowed only where the schema has floats.
class NumberCheck {
 public:
  explicit NumberCheck(const std::string& where) : where_(where) {}

  void operator()(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    const auto level = static_cast<std::size_t>(depth);
    if (event == Event::key)
      floats_[level] = std::ranges::find(kFloats, parsed.get_ref<const std::string&>()) != std::end(kFloats);
    if (event == Event::array_start) floats_[level + 1] = floats_[level];
    if (event == Event::object_start) floats_[level + 1] = false;
    if (event == Event::value && parsed.is_number_float() && !floats_[level]) require_integer(parsed.get<double>());
  }

 private:
  void require_integer(double number) const {
    constexpr double kEnd = 0x1p63;
    if (number >= -kEnd && number < kEnd) return;
    std::ostringstream text;
    text << where_ << ": found the number " << number << ", expected an integer of 64 bits.";
    throw ProgramError(text.str());
  }

  const std::string& where_;
  // Indexed by depth: true below one of these keys.
  std::array<bool, kDeepestJson + 2> floats_ = {};
};

}  // namespace

nlohmann::json parse_exported_json(std::string_view text, const std::string& where) {
  try {
    return parse_json(text, NumberCheck(where));
  } catch (const JsonError& error) {
    throw ProgramError(concat(where, ": ", error.what()));
  }
}

}  // namespace penstock::internal
