// Hints of `penstock train`: the options that help against an error of the trainer or its data. The trainer's own messages
// name no options, because programs use it too.
#pragma once

#include <functional>

namespace penstock::cli {

// Returns the result of `act`. A DataError or NonFiniteError for which the command has an option is rethrown as
// std::runtime_error with a hint.
int with_option_hints(const std::function<int()>& act);

}  // namespace penstock::cli
