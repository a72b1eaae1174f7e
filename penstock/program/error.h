// The exception of the program layer.
#pragma once

#include <stdexcept>

namespace penstock {

// Thrown for an exported program that cannot be read, split or run, and for arguments that do not fit it. The message
// names the file, the node or the argument, what was found, and what is expected.
class ProgramError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock
