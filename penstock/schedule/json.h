// Reads JSON that may come from anybody.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace penstock::internal {

// Deepest nesting of arrays and objects that is read: copying or printing a deeper document could overflow the stack.
inline constexpr int kDeepestJson = 512;

// A text that is not JSON, or is nested too deeply. The message goes on from the name of the file: "is not JSON: …".
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Called for each value as it is read, with its depth; it may throw.
using JsonVisitor = std::function<void(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value)>;

// Throws JsonError, and what `visit` throws.
nlohmann::json parse_json(std::string_view text, const JsonVisitor& visit = {});

// Returns nothing where parse_json would throw.
std::optional<nlohmann::json> try_parse_json(std::string_view text);

}  // namespace penstock::internal
