// The template that draw_html fills in. The build generates its source from page.html in this folder.
#pragma once

#include <string_view>

namespace penstock::internal {

// Returns the template, with @PENSTOCK_TITLE@ and @PENSTOCK_DATA@ as placeholders.
std::string_view page_template();

}  // namespace penstock::internal
