#include "tests/device/sim/dual_mapping.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tests/device/sim/sim_device.h"

namespace penstock::sim {
namespace {

const DualMapping* device_mapping = nullptr;
const DualMapping* pinned_mapping = nullptr;
std::size_t bytes_of_a_device = 1;
struct sigaction previous_action;

void end_process(const char* text, int code) {
  const auto ignored = ::write(STDERR_FILENO, text, std::strlen(text));
  (void)ignored;
  ::_exit(code);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (device_mapping->contains(info->si_addr)) {
    std::array<char, 128> text{};
    std::snprintf(text.data(), text.size(), "sim: the host touched memory of device %zu at %p\n",
                  device_mapping->offset_of(info->si_addr) / bytes_of_a_device, info->si_addr);
    end_process(text.data(), kExitDeviceMemory);
  }
  if (pinned_mapping->contains(info->si_addr)) {
    end_process("sim: the host touched pinned memory with a copy in flight, for which it has not waited\n",
                kExitPinnedMemory);
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0 && previous_action.sa_sigaction != nullptr) {
    previous_action.sa_sigaction(signal, info, context);
    return;
  }
  // The access is repeated after this function, and then ends the process.
  ::sigaction(signal, &previous_action, nullptr);
}

}  // namespace

DualMapping::DualMapping(const char* name, std::size_t bytes, int protection) : bytes_(bytes) {
  file_ = ::memfd_create(name, MFD_CLOEXEC);
  TORCH_CHECK(file_ >= 0 && ::ftruncate(file_, static_cast<off_t>(bytes)) == 0, "sim: memfd_create of ", bytes,
              " bytes: ", std::strerror(errno));
  void* const host = ::mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
  void* const kernel = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  TORCH_CHECK(host != MAP_FAILED && kernel != MAP_FAILED, "sim: mmap of ", bytes, " bytes: ", std::strerror(errno));
  host_ = static_cast<char*>(host);
  kernel_ = static_cast<char*>(kernel);
}

void DualMapping::protect(char* low, std::size_t bytes, int protection) {
  const auto address = reinterpret_cast<std::uintptr_t>(low);
  const std::uintptr_t first = address / kPageBytes * kPageBytes;
  const std::size_t pages = (address + bytes - first + kPageBytes - 1) / kPageBytes;
  ::mprotect(reinterpret_cast<void*>(first), pages * kPageBytes, protection);
}

void DualMapping::discard(char* low, std::size_t bytes) const {
  ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_of(low)),
              static_cast<off_t>(bytes));
}

void install_fault_handler(const DualMapping& device_memory, std::size_t device_bytes,
                           const DualMapping& pinned_memory) {
  device_mapping = &device_memory;
  pinned_mapping = &pinned_memory;
  bytes_of_a_device = device_bytes;
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace penstock::sim
