// The page that draw_html fills, from page.html beside this file; the build turns that into a source.
#pragma once

#include <string_view>

namespace penstock::internal {

std::string_view page_template();

}  // namespace penstock::internal
