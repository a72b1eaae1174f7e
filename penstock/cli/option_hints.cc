#include "penstock/cli/option_hints.h"

#include <cstddef>
#include <string_view>

#include "penstock/base/text.h"

namespace penstock::internal::cli {
namespace {

struct OptionHint {
  // Words of a hint, exactly as the library writes them.
  std::string_view advice;
  // Option that does it, with an example of its value.
  std::string_view option;
};

constexpr OptionHint kOptionHints[] = {
    // schedule
    {"declare the skip connection as an edge of the stage graph", "--edges FROM-TO"},
    {"declare the stages that share parameters as a group of the stage graph", "--shared 0,3"},
    // program
    {"add it to ProgramOptions::allowed_operators", "--allow-operator"},
    {"give the values of all weights", "--weights"},
    {"choose a standard deviation for such weights", "--init-std"},
    {"give their values", "--weights"},
    {"give the values of buffers", "--weights"},
    // transport
    {"stage tensors in CPU memory", "--device-transport staged"},
    // train
    {"use shorter sequences", "--length N"},
    {"lower the learning rate", "--learning-rate"},
    {"lower the clipping norm", "--clip"},
    {"skip such steps", "--on-nonfinite skip"},
    {"allow more skipped steps in a row", "--max-skipped"},
    {"check which target is ignored", "--ignore-index"},
};

}  // namespace

std::string with_option_hints(std::string message, const std::function<bool(const std::string& name)>& has_option) {
  // Names of the user's own, such as paths, come before the hint and are left alone.
  const std::size_t begin = message.rfind("\n  Hint: ");
  if (begin == std::string::npos) return message;
  for (const OptionHint& hint : kOptionHints) {
    const std::size_t found = message.find(hint.advice, begin);
    if (found == std::string::npos || !has_option(std::string(hint.option.substr(0, hint.option.find(' '))))) continue;
    message.insert(found + hint.advice.size(), concat(" (", hint.option, ")"));
  }
  return message;
}

}  // namespace penstock::internal::cli
