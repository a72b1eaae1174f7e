// Parses the JSON of exports, which may come from an untrusted source.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace penstock::internal {

// Returns the parsed text. Throws ProgramError, which begins with `where`, for invalid JSON, for nesting deeper than
// any exporter writes, and for numbers that do not fit the type that the schema has there.
nlohmann::json parse_exported_json(std::string_view text, const std::string& where);

}  // namespace penstock::internal
