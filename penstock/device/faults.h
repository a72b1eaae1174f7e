// Faults that a test build puts into the code for devices, to show that its tests find them. In all other builds the
// functions are constant, and cost nothing.
#pragma once

namespace penstock::internal {

enum class Fault {
  None,
  // A copy begins before its source has been computed.
  CopyWithoutEvent,
  // A copied tensor is used before the copy has ended.
  UseBeforeCopy,
  // The memory of a source is reused while it is being copied.
  EarlyFree,
  // Buffers are written to while a checkpoint copies them, or parameters and optimizer state are.
  ForwardDuringCopy,
  UpdateDuringCopy,
  // Bytes are sent from a staging buffer before they have been copied there.
  EarlySend,
};

#ifdef PENSTOCK_FAULTS
// The fault that the sources of this build have now. Set while no device computes.
extern Fault injected_fault;
inline bool is_injected(Fault fault) {
  return injected_fault == fault;
}
#else
constexpr bool is_injected(Fault /*fault*/) {
  return false;
}
#endif

}  // namespace penstock::internal
