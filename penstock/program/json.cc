#include "penstock/program/json.h"

#include "penstock/program/error.h"

namespace penstock {
namespace {

constexpr int kDeepest = 512;

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  const auto shallow = [&](int depth, nlohmann::json::parse_event_t /*event*/, nlohmann::json& /*parsed*/) {
    if (depth > kDeepest) {
      throw ProgramError(where + ": is nested more than " + std::to_string(kDeepest) + " deep.");
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, shallow);
  } catch (const nlohmann::json::exception& error) {
    throw ProgramError(where + ": is not JSON: " + error.what());
  }
}

}  // namespace penstock
