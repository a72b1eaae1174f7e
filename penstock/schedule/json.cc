#include "penstock/schedule/json.h"

#include <string>

namespace penstock {

nlohmann::json parse_json(std::string_view text, const JsonVisitor& visit) {
  const auto check = [&](int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    if (depth > kDeepestJson) throw JsonError("is nested more than " + std::to_string(kDeepestJson) + " deep.");
    if (visit) visit(depth, event, value);
    return true;
  };
  try {
    return nlohmann::json::parse(text, check);
  } catch (const nlohmann::json::exception& error) {
    throw JsonError("is not JSON: " + std::string(error.what()));
  }
}

std::optional<nlohmann::json> try_parse_json(std::string_view text) {
  try {
    return parse_json(text);
  } catch (const JsonError&) {
    return std::nullopt;
  }
}

}  // namespace penstock
