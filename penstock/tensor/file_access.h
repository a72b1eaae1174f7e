// Selects how a file is brought into memory.
#pragma once

#include <cstdint>

namespace penstock {

enum class FileAccess : std::uint8_t {
  // Maps the file: a page is read when it is first touched. The file must not be truncated or overwritten in place
  // while it is mapped; access to a page that was truncated ends the process with SIGBUS.
  Map,
  // The same for files that are only read: a write into the memory ends the process. It does not count as memory of the
  // process (RLIMIT_DATA), and pages that are not needed any more can be released.
  MapReadOnly,
  // Copies all bytes at once. Later changes of the file have no effect.
  Read
};

}  // namespace penstock
