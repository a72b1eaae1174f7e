// What is wrong with an exported program, or with what is asked of it.
#pragma once

#include <stdexcept>

namespace penstock {

// The message names the file or the node, what was found, and what would be right.
class ProgramError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock
