// JSON from anybody.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace penstock::internal {

// Of an exporter's files. Throws ProgramError, which begins with `where`, for what is no JSON, for nesting deeper than any
// exporter writes, and for numbers that are too large for where they stand.
nlohmann::json parse_exported_json(std::string_view text, const std::string& where);

}  // namespace penstock::internal
