// Messages between the ranks of a communicator, which are threads or processes of one machine. A sender publishes the
// address of its data; the receiver copies them, from the sender's process if that is another one.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cuda_standin {

// Identifies a message of a communicator.
struct MessageKey {
  int from = 0;
  int to = 0;
  // Separates collectives from sends.
  bool collective = false;
  // Number of the message among those with the same other members.
  std::uint64_t number = 0;
  friend bool operator==(const MessageKey&, const MessageKey&) = default;
};

// The state of one communicator, in memory that its ranks share. Thread-safe.
class Exchange {
 public:
  static constexpr int kMaxRanks = 16;

  // Creates the state of a communicator. Returns its identifier, which other processes can attach to while this one
  // is alive.
  static std::uint64_t create();
  // Attaches to the state. Returns nullptr if it does not exist.
  static Exchange* attach(std::uint64_t id);

  // Blocks until `size` ranks have arrived. Returns false if two of them use the same device.
  bool arrive(int rank, int size, int device);

  // Makes data available to the receiver. The data must not change before withdraw().
  void publish(const MessageKey& key, const void* data, std::size_t bytes);
  // Copies the data of a message. Returns false if it is not published.
  bool take(const MessageKey& key, void* to, std::size_t bytes);
  // Returns true if the receiver has taken the message.
  bool is_taken(const MessageKey& key);
  // Removes a message, if it is published.
  void withdraw(const MessageKey& key);

  // Ends the operations of one rank. Those of other ranks that wait for it continue to wait, as with NCCL.
  void abort(int rank);
  bool is_aborted(int rank);

  // Returns a number that changes with every call that changes the state.
  std::uint32_t version() const { return version_; }
  // Blocks until the version is another one, or for a few milliseconds.
  void wait_for_change(std::uint32_t version);

 private:
  struct Slot {
    bool used;
    bool taken;
    MessageKey key;
    pid_t process;
    const void* data;
    std::size_t bytes;
  };
  // Locks mutex_, also after a process has died with it.
  class Lock;

  Slot* find(const MessageKey& key);
  void notify();

  // Operations of a rank are few, as streams run one after the other.
  static constexpr int kSlots = 256;

  pthread_mutex_t mutex_;
  std::atomic<std::uint32_t> version_;
  int arrived_;
  int devices_[kMaxRanks];
  bool aborted_[kMaxRanks];
  Slot slots_[kSlots];
};

}  // namespace cuda_standin
