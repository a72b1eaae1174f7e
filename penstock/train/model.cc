#include "penstock/train/model.h"

#include <map>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/state_dict.h"

namespace penstock::internal {
namespace {

class GptModel final : public Model {
 public:
  GptModel(const GptOptions& options, std::uint64_t seed, int stages, std::optional<WeightFiles> weights)
      : gpt_(options, seed), firsts_(gpt_.cut(stages)), weights_(std::move(weights)) {
    if (!weights_) return;
    const StageModule whole = gpt_.stage(0, gpt_.layers(), training_, at::kMeta);
    const std::string differences = state_differences(tensors_of(whole), weights_->tensors);
    if (!differences.empty()) {
      throw WeightsError(concat(weights_->path, ": does not fit the ", description(), ":\n", differences));
    }
  }

  int num_stages() const override { return static_cast<int>(firsts_.size()) - 1; }
  WeightBytes weight_bytes(std::span<const int> stages) const override {
    WeightBytes bytes;
    for (const int stage : stages) {
      for (const auto& [name, parameter] : module(stage, at::kMeta).parameters) {
        bytes.weights += static_cast<std::int64_t>(parameter.nbytes());
      }
    }
    bytes.gradients = bytes.weights;
    return bytes;
  }
  using Model::build_stage;
  PipelineStage build_stage(int stage, at::Device device) const override {
    StageModule module = this->module(stage, device);
    if (weights_) load_state(tensors_of(module), weights_->tensors);
    return {std::move(module), stage, num_stages(), {.device = device}};
  }
  std::vector<std::string> parameter_names() const override { return gpt_.parameter_names(); }
  std::string description() const override {
    const GptOptions& options = gpt_.options();
    return concat("GPT, ", options.layers, " layers of width ", options.width, " with ", options.heads,
                  " heads, texts of ", options.length, " bytes");
  }
  void set_training(bool training) override { *training_ = training; }
  bool is_training() const override { return *training_; }

 private:
  StageModule module(int stage, at::Device device = at::kCPU) const {
    const auto index = static_cast<std::size_t>(stage);
    return gpt_.stage(firsts_.at(index), firsts_.at(index + 1), training_, device);
  }
  static std::vector<ModelTensor> tensors_of(const StageModule& module) {
    std::vector<ModelTensor> tensors;
    for (const auto& [name, parameter] : module.parameters) tensors.push_back({.names = {name}, .tensor = parameter});
    return tensors;
  }

  Gpt gpt_;
  std::vector<int> firsts_;
  std::optional<WeightFiles> weights_;
  std::shared_ptr<bool> training_ = std::make_shared<bool>(true);
};

class ProgramModel final : public Model {
 public:
  explicit ProgramModel(Pipe pipe) : pipe_(std::move(pipe)) {
    for (const WeightInfo& weight : pipe_.program().weights()) {
      for (const std::string& name : weight.names) names_[name] = weight.names;
    }
  }

  int num_stages() const override { return pipe_.num_stages(); }
  WeightBytes weight_bytes(std::span<const int> stages) const override {
    WeightBytes bytes;
    std::map<std::string, std::int64_t> buffers;
    for (const int stage : stages) {
      const PipeInfo::Stage& info = pipe_.info().stages.at(static_cast<std::size_t>(stage));
      bytes.weights += info.parameter_bytes;
      bytes.gradients += info.gradient_bytes;
      buffers.insert(info.buffer_bytes.begin(), info.buffer_bytes.end());
    }
    for (const auto& [name, size] : buffers) bytes.weights += size;
    return bytes;
  }
  void load_stage(int stage) const override { pipe_.get_stage_module(stage); }
  using Model::build_stage;
  PipelineStage build_stage(int stage, at::Device device) const override {
    StageModule module = device.is_cpu() ? pipe_.get_stage_module(stage) : pipe_.stage_module_on(stage, device);
    return {std::move(module), stage, num_stages(), {.device = device}};
  }
  Wiring wiring() const override { return pipe_.wiring(); }
  SharedParameters shared_parameters() const override { return pipe_.shared_parameters(); }
  std::vector<std::string> parameter_names() const override {
    std::vector<std::string> names;
    for (const ProgramInput& input : pipe_.program().inputs()) {
      if (input.kind == ProgramInput::Kind::Parameter) names.push_back(input.name);
    }
    return names;
  }
  std::vector<std::string> buffer_names() const override {
    std::vector<std::string> names;
    for (const ProgramInput& input : pipe_.program().inputs()) {
      if (input.kind == ProgramInput::Kind::Buffer) names.push_back(input.name);
    }
    return names;
  }
  std::vector<std::string> names_of(const std::string& name) const override { return names_.at(name); }
  std::vector<std::string> non_persistent_buffers() const override {
    std::vector<std::string> names;
    for (const ProgramInput& input : pipe_.program().inputs()) {
      if (input.kind == ProgramInput::Kind::Buffer && !input.persistent) names.push_back(input.name);
    }
    return names;
  }
  std::string description() const override {
    std::int64_t elements = 0;
    for (const WeightInfo& weight : pipe_.program().weights()) {
      if (weight.is_parameter) elements += weight.numel() * static_cast<std::int64_t>(weight.names.size());
    }
    return concat("an exported model with ", parameter_names().size(), " parameters of ", elements, " elements");
  }
  void set_training(bool training) override { training ? pipe_.train() : pipe_.eval(); }
  bool is_training() const override { return pipe_.program().is_training(); }

 private:
  Pipe pipe_;
  // All names of a tensor, indexed by each of them.
  std::map<std::string, std::vector<std::string>> names_;
};

}  // namespace

std::unique_ptr<Model> gpt_model(const GptOptions& options, std::uint64_t seed, int stages,
                                 std::optional<WeightFiles> weights) {
  return std::make_unique<GptModel>(options, seed, stages, std::move(weights));
}

std::unique_ptr<Model> program_model(Pipe pipe) {
  return std::make_unique<ProgramModel>(std::move(pipe));
}

}  // namespace penstock::internal
