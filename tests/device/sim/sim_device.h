// A simulated accelerator for libtorch, which registers the device type PrivateUse1 under the name "sim". It lets a
// machine without an accelerator find the errors that a program makes on one:
//
// - Device memory is memory that the host cannot touch: a tensor's data_ptr() is mapped without any access, and kernels
//   use a second mapping of the same pages. The host gets SIGSEGV, which ends the process with kExitDeviceMemory; a
//   system call gets EFAULT.
// - A stream is a queue with a thread, which waits a random time before some of its work. Operators run there on the
//   CPU's kernels, so results have the CPU's bits.
// - A happens-before detector reports any two accesses to the same bytes, one of them a write, that no event,
//   synchronisation or stream orders. It looks at the order of calls, not at timing, so a race is found every time.
// - The allocator has the rules of CUDA's: a freed block is reused at once on the stream that it was allocated on, and
//   waits for other streams only after record_stream.
// - Pinned memory with a copy in flight is protected from the host until the host has waited for the copy: reading the
//   target or writing the source ends the process with kExitPinnedMemory.
//
//   penstock::sim::install({});
//   const at::Tensor x = at::ones({4}, at::Device("sim:0"));
//   …
//   EXPECT_TRUE(penstock::sim::take_races().empty());
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace penstock::sim {

// Exit codes of a process that the simulation ends.
inline constexpr int kExitRaces = 86;         // races were found, and the process would have succeeded
inline constexpr int kExitDeviceMemory = 87;  // the host touched device memory
inline constexpr int kExitPinnedMemory = 88;  // the host touched pinned memory with a copy in flight
inline constexpr int kExitKernelFailed = 89;  // a kernel threw on its stream's thread

struct Options {
  int devices = 4;
  // Memory of each device, and of pinned memory.
  std::size_t device_bytes = std::size_t{4} << 30U;
  // Seed of the delays.
  std::uint64_t seed = 1;
  // Longest time that a stream waits before a piece of work. It waits before every fourth on average.
  int max_delay_us = 200;
  // Throws a race where it is found, in addition to keeping it for take_races().
  bool throw_races = false;
  // Writes races that nobody took to stderr when the process exits, and turns exit code 0 into kExitRaces.
  bool report_at_exit = false;
  // Writes a stack trace to stderr for each host wait.
  bool print_host_waits = false;
};

// Registers the device type. Call it once, before any other use of the device and before the first backward of the
// process, on whatever device: the autograd engine then starts a thread for each device that there is. The threads of
// streams end when the process exits; tensors may outlive them.
void install(const Options& options);
bool is_installed();

void set_max_delay_us(int microseconds);
void set_throw_races(bool enabled);

struct Counters {
  // Operators that were launched on a stream.
  std::uint64_t kernels = 0;
  std::uint64_t copies = 0;
  // Number of times that the host waited for an event, a stream or a device: synchronize(), item(), blocking copies and
  // operators whose result's shape depends on data.
  std::uint64_t host_waits = 0;
  // Number of operators for which the simulation waited although an accelerator would not, because neither a Meta kernel
  // nor a trial on other values gave the shapes of the results. No order follows from these waits.
  std::uint64_t simulation_waits = 0;
  std::uint64_t races = 0;
};
Counters counters();

// Returns the races found since the last call. Each names both operators, their streams, tensors and bytes.
std::vector<std::string> take_races();
// Returns the operators that the simulation waited for, each once.
std::vector<std::string> simulation_waits();
// Returns the operators without a Meta kernel, each once. A trial run on the CPU gave the shapes of their results.
std::vector<std::string> operators_without_meta();

// Keeps a stack trace of each host wait from now on, or stops doing so.
void trace_host_waits(bool enabled);
std::vector<std::string> take_host_wait_traces();

// A tensor of the device or in pinned memory that a kernel uses.
struct Use {
  const at::Tensor* tensor = nullptr;
  bool writes = false;
};

// Launches a kernel of the caller's own. `kernel` runs on the stream's thread and accesses tensors through host_view().
// It must not own tensors of the device: freeing memory before the kernel has run is an error of the program, which the
// detector should see. `name` has to live as long as the process.
void launch(c10::Stream stream, const char* name, const std::vector<Use>& uses, std::function<void()> kernel);
// Returns a CPU tensor over the memory of a tensor of the device or in pinned memory, for use inside of kernels. It does
// not own the memory. For a kernel that writes, a storage that is copied on write gets its copy first.
at::Tensor host_view(const at::Tensor& tensor, bool writes = false);

}  // namespace penstock::sim

extern "C" {
// Installs the device for programs that load the library with dlopen. Reads PENSTOCK_SIM_DEVICES (default 4),
// PENSTOCK_SIM_SEED, PENSTOCK_SIM_DELAY_US, PENSTOCK_SIM_DEVICE_MB and PENSTOCK_SIM_PRINT_HOST_WAITS, and reports races
// at exit. Returns 0, or 1 after writing to stderr why it failed. Further calls do nothing.
int penstock_device_install();
}
