// Selects how a file is brought into memory.
#pragma once

#include <cstdint>

namespace penstock {

enum class FileAccess : std::uint8_t {
  // Maps the file: a page is read when it is first touched. The file must not be truncated or overwritten in place
  // while it is mapped; access to a page that was truncated ends the process with SIGBUS.
  Map,
  // Copies all bytes at once. Later changes of the file have no effect.
  Read
};

}  // namespace penstock
