// A model in stages, ready to be trained: a GPT, or what torch.export.save has written.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"
#include "penstock/train/gpt.h"
#include "penstock/train/weight_files.h"

namespace penstock::internal {

class Model {
 public:
  virtual ~Model() = default;

  virtual int num_stages() const = 0;
  // A stage of this model. Its first weights are the same in every model that is made alike.
  virtual PipelineStage build_stage(int stage) const = 0;
  virtual Wiring wiring() const { return Wiring(num_stages()); }
  virtual SharedParameters shared_parameters() const { return {}; }

  // All that the model has for its parameters, in an order that does not depend on the cut.
  virtual std::vector<std::string> parameter_names() const = 0;
  // Names of all its buffers.
  virtual std::vector<std::string> buffer_names() const { return {}; }
  // All names of the parameter or buffer of this name: tied ones have several.
  virtual std::vector<std::string> names_of(const std::string& name) const { return {name}; }

  // Names of buffers that the model's state_dict leaves out.
  virtual std::vector<std::string> non_persistent_buffers() const { return {}; }

  // Returns one short line for people and for checkpoints. Models that differ in names or sizes alone may share it.
  virtual std::string description() const = 0;

  // Dropout drops and batch normalisation learns, or not, in all stages that were built.
  virtual void set_training(bool training) = 0;
  virtual bool is_training() const = 0;
};

// Its first weights are those of the seed, or `weights`. Throws WeightsError, which begins with the path of the weights and
// lists what differs, unless they fit.
std::unique_ptr<Model> gpt_model(const GptOptions& options, std::uint64_t seed, int stages,
                                 std::optional<WeightFiles> weights = std::nullopt);
// Its weights are the pipe's own, so a pipe is good for one model.
std::unique_ptr<Model> program_model(Pipe pipe);

}  // namespace penstock::internal
