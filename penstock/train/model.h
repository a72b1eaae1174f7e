// A model that is cut into stages and can be trained: the built-in GPT, or an exported program.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"
#include "penstock/train/gpt.h"
#include "penstock/train/weight_files.h"

namespace penstock::internal {

// Bytes of the weights of stages, and of their gradients.
struct WeightBytes {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
};

// Not thread-safe, except that stages that were built may run on several threads.
class Model {
 public:
  virtual ~Model() = default;

  virtual int num_stages() const = 0;
  // Returns the sizes of stages that one rank has, without loading or drawing their weights.
  virtual WeightBytes weight_bytes(std::span<const int> stages) const = 0;
  // Reads what build_stage() needs from files, and throws what that does if they are damaged.
  virtual void load_stage(int /*stage*/) const {}
  // Returns a new stage. Models that were constructed with the same arguments have the same initial weights, on any
  // device.
  PipelineStage build_stage(int stage) const { return build_stage(stage, at::kCPU); }
  virtual PipelineStage build_stage(int stage, at::Device device) const = 0;
  virtual Wiring wiring() const { return Wiring(num_stages()); }
  virtual SharedParameters shared_parameters() const { return {}; }

  // Returns the names of all parameters, in an order that does not depend on the stages.
  virtual std::vector<std::string> parameter_names() const = 0;
  // Returns the names of all buffers.
  virtual std::vector<std::string> buffer_names() const { return {}; }
  // Returns all names of a parameter or buffer, of which one is given: tied tensors have several.
  virtual std::vector<std::string> names_of(const std::string& name) const { return {name}; }

  // Returns the names of buffers that the model's state_dict leaves out.
  virtual std::vector<std::string> non_persistent_buffers() const { return {}; }

  // Returns one short line for people and checkpoints. Models that differ only in names or sizes may share it.
  virtual std::string description() const = 0;

  // Switches all stages that were built between training and evaluation mode, for dropout and batch normalisation.
  virtual void set_training(bool training) = 0;
  virtual bool is_training() const = 0;
};

// Returns a GPT whose initial weights are drawn from the seed, or are `weights`. Throws WeightsError, which lists the
// differences, if they do not fit, and std::invalid_argument for sizes that are not valid.
std::unique_ptr<Model> gpt_model(const GptOptions& options, std::uint64_t seed, int stages,
                                 std::optional<WeightFiles> weights = std::nullopt);
// Returns a model with the stages of an exported program. It shares the weights of the pipe, so each model needs its
// own.
std::unique_ptr<Model> program_model(Pipe pipe);

}  // namespace penstock::internal
