// Escapes text for SVG and HTML.
#pragma once

#include <string>
#include <string_view>

namespace penstock::internal {

// Returns the text with & < > " escaped and control characters replaced by a question mark.
std::string xml_text(std::string_view text);

}  // namespace penstock::internal
