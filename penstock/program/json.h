// JSON from anybody.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace penstock {

// Throws ProgramError, which begins with `where`, for what is no JSON, and for nesting deeper than any exporter writes.
nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace penstock
