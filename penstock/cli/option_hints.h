// Names the options of the command in the hints of the library's errors.
#pragma once

#include <functional>
#include <string>

namespace penstock::internal::cli {

// Returns the message of an error of the library with the option for each piece of advice in it: "… lower the learning
// rate …" becomes "… lower the learning rate (--learning-rate) …". The library itself knows no command line, so its
// hints name no options; a new piece of advice is one more row of the table in the source. Only options for which
// `has_option` returns true, as the command has them, are named: it is called with "--learning-rate".
std::string with_option_hints(std::string message, const std::function<bool(const std::string& name)>& has_option);

}  // namespace penstock::internal::cli
