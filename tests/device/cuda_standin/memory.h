// Memory of the stand-in. Each device has an address range that the host cannot access: reading a device tensor on the
// host ends the process with SIGSEGV, as on a machine with a GPU. Streams use a second mapping of the same memory.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace cuda_standin {

inline constexpr int kDevices = 4;
// Size of a device's memory, and of pinned memory. Pages take no memory before they are used.
inline constexpr std::size_t kMemoryBytes = std::size_t{4} << 30U;

// A range of addresses from which blocks are allocated. Thread-safe. Never destroyed, as streams use it until the
// process ends.
class Arena {
 public:
  // `protection` is that of the addresses which allocate() returns.
  Arena(const char* name, int protection);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns nullptr if there is no memory left.
  void* allocate(std::size_t bytes);
  // Ignores addresses that are not those of blocks.
  void release(void* block);
  bool contains(const void* address) const;
  // Returns the address at which streams access the same byte.
  void* accessible(const void* address) const;
  std::size_t unused_bytes();

 private:
  char* addresses_;
  char* accessible_;
  std::mutex mutex_;
  // Offset of the first byte that was never allocated.
  std::size_t end_ = 0;
  std::map<char*, std::size_t> blocks_;
  // Released blocks by size. A block is used again for the same size only.
  std::multimap<std::size_t, char*> released_;
};

Arena& device_memory(int device);
Arena& pinned_memory();

// Returns the device whose memory contains the address, or -1.
int device_of(const void* address);
// Returns true for memory of a device and pinned memory, which copies access asynchronously.
bool is_allocated_by_cuda(const void* address);
// Returns the address at which a stream accesses memory of a device or of the host.
void* accessible(const void* address);

}  // namespace cuda_standin
