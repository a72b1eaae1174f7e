// Runs the actions of one rank. One loop walks the rank's list of lowered actions, whatever the schedule, the placement
// or the graph of stages.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/device/transfer.h"
#include "penstock/runtime/actions.h"
#include "penstock/runtime/device_inputs.h"
#include "penstock/runtime/device_times.h"
#include "penstock/runtime/message_order.h"
#include "penstock/runtime/record.h"
#include "penstock/runtime/step_losses.h"
#include "penstock/runtime/step_state.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/shared_sum.h"
#include "penstock/stage/stage.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Position of a rank in its list, for the reports of failures. The rank writes it, any thread reads it.
struct Progress {
  // Index of the action that the rank began last. It is -1 before the first action, the number of actions while the
  // rank waits for others at the end of the step, and one more when it has finished.
  std::atomic<int> position = -1;
  // Time at which that action began, in nanoseconds since the step began.
  std::atomic<std::int64_t> since = 0;
  // True while the host waits for a device that is far behind.
  std::atomic<bool> waits_for_device = false;
};

// Sum of the gradients of one shared parameter, as seen from one rank, with the index of its group in the stage graph.
struct StageSum {
  int group = 0;
  SharedSum sum;
};

class Executor {
 public:
  // Takes the stages of one rank, by index, and the sums that it takes part in. The transport may connect several
  // replicas; the ranks of this replica are those from `first_rank` on. `devices` is that of all process ranks. All
  // arguments outlive the executor.
  Executor(Transport& transport, int first_rank, std::map<int, PipelineStage*> stages, std::vector<StageSum>& sums,
           const ActionFunctions& functions, const StageDeviceTable& devices)
      : transport_(&transport),
        first_rank_(first_rank),
        stages_(std::move(stages)),
        sums_(&sums),
        functions_(&functions),
        devices_(&devices) {}

  // Tells the transport the messages of a schedule, which connects ranks that exchange tensors directly. Process ranks
  // call it at the same time. The schedule outlives the executor.
  void connect(const Schedule& schedule);

  // Begin a step: begin_step of all ranks, then begin_sums of all ranks, then save. One thread calls them for all
  // ranks, as ranks may share a parameter. The first two throw StageError.
  void begin_step(const StepInputs& inputs);
  void begin_sums(const StepInputs& inputs);
  // Saves everything that the step may change.
  void save(SavedState& saved) const;
  // End a step: end_step after a success, rollback_step after a failure, when the saved state has been restored. One
  // thread calls them for all ranks.
  void end_step();
  void rollback_step();

  // Runs this rank's actions, on the thread of the rank, and records when each began and ended. Throws what an action
  // throws; `progress` then tells which action it was. On devices, the host does not wait for what it starts: `times`
  // tells when it ran.
  void run(const StepInputs& inputs, StepOutputs& outputs, std::vector<ActionRecord>& record, DeviceTimes& times,
           Progress& progress);

 private:
  friend class penstock::ActionContext;

  // Runs an action by its override, if it has one.
  void run_action(const Action& action);
  void run_default(const Action& action);
  void forward(const Action& action);
  void backward(const Action& action);
  void send(const Action& action);
  void post_receive(const Action& action);
  void sync_parameters(const Action& action);
  void finish_reductions();
  // Names a tensor of a message for errors: "output 1 of stage 2".
  std::string name_of_value(const Edge& edge, Direction direction, std::size_t index) const;

  // Blocks while the device is too far behind, after it was given a computation, of which the event is the end.
  void wait_for_device(const TimedEvent& end, const Action& action, Progress& progress);
  // Returns the device of an action whose time the device has to tell.
  std::optional<at::Device> timed_device(const Action& action) const;

  int rank() const { return transport_->rank() - first_rank_; }
  int rank_of(int stage) const { return first_rank_ + inputs_->schedule->placement().rank_of(stage); }

  // Takes the messages that a computation of a stage needs: activations of the edges that lead to it, or gradients of
  // those that lead away from it. Blocks until messages from other ranks have arrived.
  std::vector<Message> collect(int stage, int microbatch, Direction direction);
  // Stores the messages that a computation of a stage has made, one for each edge, for a stage of this rank or for a
  // send.
  void put(int stage, int microbatch, Direction direction, std::vector<Message> messages);
  // Moves a message of one stage to the device of another stage of this rank.
  void hand_over(Message& message, at::Device device);
  Message& slot(Direction direction, int edge, int microbatch);
  std::size_t slot_index(int edge, int microbatch) const;
  Deadline deadline() const { return deadline_after(inputs_->timeout); }

  Transport* transport_;
  int first_rank_;
  std::map<int, PipelineStage*> stages_;
  std::vector<StageSum>* sums_;
  const ActionFunctions* functions_;
  const StageDeviceTable* devices_;
  // Orders of the schedules that have been run, if the transport needs them.
  std::map<const Schedule*, std::shared_ptr<const MessageOrder>> orders_;

  // Computations that the devices may not have finished, also of earlier steps, with their ends.
  std::deque<std::pair<TimedEvent, Action>> computed_;

  // State of the current step.
  const StepInputs* inputs_ = nullptr;
  StepOutputs* outputs_ = nullptr;
  // Record of the current action.
  ActionRecord* current_ = nullptr;
  std::size_t current_index_ = 0;
  // Null if the rank computes on the CPU alone.
  DeviceTimes* times_ = nullptr;
  // Receives that were posted, by slot and direction: the index of their action.
  std::unordered_map<std::size_t, std::size_t> posted_;
  DeviceInputs device_inputs_;
  CopyStreams copy_streams_;
  StepLosses losses_;
  // Stages and microbatches that this rank recomputes.
  std::set<std::pair<int, int>> recomputed_;
  // Messages that wait for a stage of this rank, or to be sent, by edge and microbatch.
  std::vector<Message> activations_;
  std::vector<Message> gradients_;
};

}  // namespace penstock::internal
