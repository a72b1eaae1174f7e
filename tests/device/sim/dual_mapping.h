// Memory that is mapped twice: at the address that tensors have, where the host's access is restricted, and at a second
// one, which kernels use. Nothing has to be unprotected while a kernel runs.
#pragma once

#include <cstddef>

namespace penstock::sim {

class DualMapping {
 public:
  // Reserves the addresses; pages are allocated at their first use. `protection` is the host's, as for mmap.
  DualMapping(const char* name, std::size_t bytes, int protection);
  DualMapping(const DualMapping&) = delete;
  DualMapping& operator=(const DualMapping&) = delete;

  bool contains(const void* pointer) const { return pointer >= host_ && pointer < host_ + bytes_; }
  // Returns the address in the second mapping.
  void* kernel_address(const void* pointer) const { return kernel_ + offset_of(pointer); }
  std::size_t offset_of(const void* pointer) const {
    return static_cast<std::size_t>(static_cast<const char*>(pointer) - host_);
  }
  char* host_address(std::size_t offset) const { return host_ + offset; }

  // Changes what the host may do with the pages that contain these bytes.
  static void protect(char* low, std::size_t bytes, int protection);
  // Returns the pages to the system.
  void discard(char* low, std::size_t bytes) const;

 private:
  char* host_ = nullptr;
  char* kernel_ = nullptr;
  std::size_t bytes_ = 0;
  int file_ = -1;
};

inline constexpr std::size_t kPageBytes = 4096;

// Ends the process with a message and an exit code if the host touches the memory of a device or protected pinned
// memory. Other faults go to the handler that was there before.
void install_fault_handler(const DualMapping& device_memory, std::size_t device_bytes,
                           const DualMapping& pinned_memory);

}  // namespace penstock::sim
