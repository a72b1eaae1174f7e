// What ends the waiting of all ranks: a rank that fails says so to every other, and one that disappears is noticed by
// every other. The first of these is the verdict, and all waits end with it, now and later.
//
// This needs a group of its own, in which each rank has a receive posted from each other one, and a thread that waits
// for it: a c10d::Work for a single message can be waited for and not asked.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/transport/deadline_timer.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

class ControlChannel {
 public:
  // `on_verdict` is called once, by whichever thread brings it about, after the alarms have rung.
  ControlChannel(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> on_verdict);
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // Says good-bye to the others and ends all waiting of this rank, for good.
  void leave();
  // Does the same and keeps the connections, for a process that exits: it makes no tensor, and joins the threads.
  void stop();

  // The verdict, unless there is one; all other ranks are told.
  void abort(const std::string& why) noexcept;
  void on_abort(std::function<std::string()> report);
  // There is a verdict.
  std::vector<std::optional<std::string>> reports(Deadline deadline);

  // Throws the verdict, if there is one.
  void throw_if_aborted();

  // Waits for one message, sent or received. Throws TransportError: the verdict, or Gone when the connection to `peer`
  // broke, or Late with `what` when the deadline has passed; the message may then still be waited for.
  void wait(c10d::Work& work, Deadline deadline, int peer, const std::string& what);

  // Throws the verdict, waiting a moment for it; that `peer` is not there any more when there is none.
  [[noreturn]] void throw_connection_lost(int peer, const std::exception& how);

 private:
  struct Word;
  struct Peer {
    int rank = 0;
    at::Tensor message;
    c10::intrusive_ptr<c10d::Work> receive;
    // Has said good-bye.
    bool left = false;
    // Has said all that it will.
    bool silent = false;
    std::optional<std::string> report;
    std::thread thread;
  };

  void watch(Peer& peer);
  // Reads the one message of a peer.
  void hear(Peer& peer);
  void conclude(TransportError::Why why, int peer, const std::string& what);
  // Tells the others the verdict, and what this rank is doing.
  void say_verdict();
  // Sends one word to each of the others; the first call counts. With word_mutex_ locked.
  void say(const Word& word);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::function<void()> on_verdict_;
  DeadlineTimer alarms_;
  Monitor monitor_{Clock::duration::zero()};
  std::optional<TransportError> verdict_;
  std::vector<Peer> peers_;
  std::mutex word_mutex_;
  // Made beforehand: threads may have something to say when no operator works any more, as the process exits.
  at::Tensor own_message_;
  bool spoken_ = false;
  std::function<std::string()> report_;
  std::optional<std::string> own_report_;
};

}  // namespace penstock::internal
