#include "tests/device/cuda_standin/exchange.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <string>

#include "tests/device/cuda_standin/runtime.h"

namespace cuda_standin {

class Exchange::Lock {
 public:
  explicit Lock(Exchange& exchange) : mutex_(exchange.mutex_) {
    const int error = ::pthread_mutex_lock(&mutex_);
    if (error == EOWNERDEAD) ::pthread_mutex_consistent(&mutex_);
  }
  ~Lock() { ::pthread_mutex_unlock(&mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

std::uint64_t Exchange::create() {
  // The descriptor stays open, so that other processes can open it through /proc.
  const int file = ::memfd_create("cuda_standin_exchange", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, sizeof(Exchange)) != 0) fail("a communicator cannot be created");
  const std::uint64_t id = (static_cast<std::uint64_t>(::getpid()) << 32U) | static_cast<std::uint32_t>(file);
  Exchange* const exchange = attach(id);
  if (exchange == nullptr) fail("a communicator cannot be mapped");
  // All other members are zero, as the file is.
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&exchange->mutex_, &attributes);
  ::pthread_mutexattr_destroy(&attributes);
  return id;
}

Exchange* Exchange::attach(std::uint64_t id) {
  // Lets the processes of other ranks read the memory of this one.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  const std::string path = "/proc/" + std::to_string(id >> 32U) + "/fd/" + std::to_string(id & 0xffffffffU);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const mapped = ::mmap(nullptr, sizeof(Exchange), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return mapped == MAP_FAILED ? nullptr : static_cast<Exchange*>(mapped);
}

bool Exchange::arrive(int rank, int size, int device) {
  {
    const Lock lock(*this);
    devices_[rank] = device;
    ++arrived_;
    notify();
  }
  for (;;) {
    const std::uint32_t seen = version();
    {
      const Lock lock(*this);
      if (arrived_ >= size) return std::count(devices_, devices_ + size, device) == 1;
    }
    wait_for_change(seen);
  }
}

void Exchange::publish(const MessageKey& key, const void* data, std::size_t bytes) {
  const Lock lock(*this);
  for (Slot& slot : slots_) {
    if (slot.used) continue;
    slot = {.used = true, .taken = false, .key = key, .process = ::getpid(), .data = data, .bytes = bytes};
    notify();
    return;
  }
  fail("too many messages are in flight");
}

bool Exchange::take(const MessageKey& key, void* to, std::size_t bytes) {
  const Lock lock(*this);
  Slot* const slot = find(key);
  if (slot == nullptr || slot->taken) return false;
  // NCCL would hang, or write beyond the end.
  if (slot->bytes != bytes) {
    fail(("rank " + std::to_string(key.from) + " sends " + std::to_string(slot->bytes) + " bytes, and rank " +
          std::to_string(key.to) + " receives " + std::to_string(bytes))
             .c_str());
  }
  if (slot->process == ::getpid()) {
    std::memcpy(to, slot->data, bytes);
  } else {
    const iovec local{.iov_base = to, .iov_len = bytes};
    const iovec remote{.iov_base = const_cast<void*>(slot->data), .iov_len = bytes};
    // A sender that has died is never received from.
    if (bytes > 0 && ::process_vm_readv(slot->process, &local, 1, &remote, 1, 0) != static_cast<ssize_t>(bytes)) {
      if (errno == EPERM) fail("the memory of another rank's process cannot be read");
      return false;
    }
  }
  slot->taken = true;
  notify();
  return true;
}

bool Exchange::is_taken(const MessageKey& key) {
  const Lock lock(*this);
  const Slot* const slot = find(key);
  return slot != nullptr && slot->taken;
}

void Exchange::withdraw(const MessageKey& key) {
  const Lock lock(*this);
  if (Slot* const slot = find(key)) slot->used = false;
}

void Exchange::abort(int rank) {
  const Lock lock(*this);
  aborted_[rank] = true;
  notify();
}

bool Exchange::is_aborted(int rank) {
  const Lock lock(*this);
  return aborted_[rank];
}

void Exchange::wait_for_change(std::uint32_t version) {
  const timespec timeout{.tv_sec = 0, .tv_nsec = 5'000'000};
  ::syscall(SYS_futex, &version_, FUTEX_WAIT, version, &timeout, nullptr, 0);
}

Exchange::Slot* Exchange::find(const MessageKey& key) {
  for (Slot& slot : slots_) {
    if (slot.used && slot.key == key) return &slot;
  }
  return nullptr;
}

void Exchange::notify() {
  ++version_;
  ::syscall(SYS_futex, &version_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cuda_standin
