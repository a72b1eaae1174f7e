// Parses JSON from untrusted sources.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace penstock::internal {

// Maximum nesting of arrays and objects: copying or printing a deeper document could overflow the stack.
inline constexpr int kDeepestJson = 512;

// Thrown for a text that is not JSON or is nested too deeply. The message is a predicate, to follow the name of the
// file: "is not JSON: …".
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Called for each value as it is read, with its depth; it may throw.
using JsonVisitor = std::function<void(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value)>;

// Throws JsonError, and whatever `visit` throws.
nlohmann::json parse_json(std::string_view text, const JsonVisitor& visit = {});

// Returns nothing where parse_json would throw.
std::optional<nlohmann::json> try_parse_json(std::string_view text);

}  // namespace penstock::internal
