// Models in stages for the tests of the runtime, each with the same weights every time it is made, and a reference that
// computes the same in one process without a pipeline.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/module.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/random_scope.h"
#include "tests/device/test_devices.h"

namespace penstock::internal::testing {

// Returns the device of a stage.
using StageDevices = std::function<at::Device(int stage)>;
inline at::Device on_cpu(int /*stage*/) {
  return at::kCPU;
}

// Places all stages on one device, where a model needs no copies of what its stages share.
inline at::Device on_first_device(int /*stage*/) {
  return test_device(0);
}

struct Model {
  explicit Model(int count, StageDevices stage_devices = test_device)
      : wiring(count), stages(static_cast<std::size_t>(count)), devices(std::move(stage_devices)) {}

  Wiring wiring;
  std::vector<StageModule> stages;
  StageDevices devices;
  // Shared parameters of which each stage has a copy.
  SharedParameters copies = {};
  // Shared parameters that are one tensor. A process that has all stages finds these without being told.
  SharedParameters tied = {};

  StagedModel build() const {
    std::vector<int> all(stages.size());
    std::iota(all.begin(), all.end(), 0);
    return {make_stages(all), wiring, copies};
  }
  // Returns the model with some of its stages, for a process rank.
  StagedModel build(const std::vector<int>& indices) const {
    SharedParameters shared = copies;
    shared.insert(shared.end(), tied.begin(), tied.end());
    return {make_stages(indices), wiring, std::move(shared)};
  }

 private:
  std::vector<PipelineStage> make_stages(const std::vector<int>& indices) const {
    std::vector<PipelineStage> made;
    for (const int i : indices) {
      made.emplace_back(stages[static_cast<std::size_t>(i)], i, static_cast<int>(stages.size()),
                        StageOptions{.device = devices(i)});
    }
    return made;
  }
};

constexpr std::int64_t kWide = 8;

// Returns a random weight, the same for the same name on any device.
inline at::Tensor weight(const std::string& name, at::IntArrayRef shape, at::Device device = at::kCPU) {
  at::Generator generator = at::detail::createCPUGenerator(std::hash<std::string>()(name));
  return at::randn(shape, generator).mul_(0.3).to(device).requires_grad_();
}

inline const at::Tensor& tensor(const Args& args, std::size_t index) {
  return args.at(index).toTensor();
}

inline std::string numbered(const char* name, int number) {
  return std::string(name).append(std::to_string(number));
}

// y = tanh(x W + b)
inline Model perceptron(int stages, const StageDevices& devices = test_device) {
  Model model(stages, devices);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor w = weight(numbered("w", i), {kWide, kWide}, devices(i));
    const at::Tensor b = weight(numbered("b", i), {kWide}, devices(i));
    model.stages[static_cast<std::size_t>(i)] = {.forward = [w, b](const Args& args, const Kwargs&) -> c10::IValue {
                                                   return at::tanh(at::addmm(b, tensor(args, 0), w));
                                                 },
                                                 .parameters = {{"w", w}, {"b", b}}};
  }
  return model;
}

// Rows as sequences of 4 tokens: attention and a small perceptron, both with dropout.
inline Model transformer(int stages, const StageDevices& devices = test_device) {
  Model model(stages, devices);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor qkv = weight(numbered("qkv", i), {kWide, 3 * kWide}, devices(i));
    const at::Tensor out = weight(numbered("out", i), {kWide, kWide}, devices(i));
    const at::Tensor up = weight(numbered("up", i), {kWide, 2 * kWide}, devices(i));
    const at::Tensor down = weight(numbered("down", i), {2 * kWide, kWide}, devices(i));
    const at::Tensor gain = weight(numbered("gain", i), {kWide}, devices(i));
    model.stages[static_cast<std::size_t>(i)] = {
        .forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
          const at::Tensor x = tensor(args, 0);
          const at::Tensor tokens = x.view({x.size(0), -1, kWide});
          const std::vector<at::Tensor> parts = at::matmul(tokens, qkv).chunk(3, -1);
          const at::Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
          at::Tensor y = tokens + at::dropout(at::matmul(mixed, out), 0.2, /*train=*/true);
          y = at::layer_norm(y, {kWide}, gain);
          y = y + at::dropout(at::matmul(at::gelu(at::matmul(y, up)), down), 0.2, /*train=*/true);
          return y.view(x.sizes());
        },
        .parameters = {{"qkv", qkv}, {"out", out}, {"up", up}, {"down", down}, {"gain", gain}}};
  }
  return model;
}

// Stages that send several tensors: with and without a gradient, None, and integers.
inline Model several_tensors(int stages, const StageDevices& devices = test_device) {
  Model model(stages, devices);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor w = weight(numbered("several", i), {kWide, kWide}, devices(i));
    const at::Tensor scale = weight(numbered("scale", i), {}, devices(i));
    const bool first = i == 0;
    const bool last = i == stages - 1;
    model.stages[static_cast<std::size_t>(i)] = {
        .forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
          const at::Tensor x = tensor(args, 0);
          const at::Tensor carried = first ? x * scale : tensor(args, 1);
          const at::Tensor count = first ? at::zeros({x.size(0)}, x.options().dtype(at::kLong)) : tensor(args, 3);
          const at::Tensor fixed = first ? x.detach() + 1 : tensor(args, 4);
          // Not contiguous, and a view.
          const at::Tensor y = at::matmul(at::sin(x), w).t().clone().t() + 0.1 * fixed;
          if (last) return y + carried * count.unsqueeze(1);
          return c10::ivalue::Tuple::create({y, carried * scale, c10::IValue(), count + 1, fixed});
        },
        .parameters = {{"w", w}, {"scale", scale}}};
  }
  return model;
}

// The third and the last stage also take a second output of the first; every stage writes into its arguments.
inline Model with_skips(int stages, const StageDevices& devices = test_device) {
  Model model(stages, devices);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor w = weight(numbered("skip", i), {kWide, kWide}, devices(i));
    const bool takes_skip = (i == 2 || i == stages - 1) && i > 1;
    if (i == 1) model.wiring.connect(1, {{0, 0}});
    if (takes_skip) model.wiring.connect(i, {{i - 1, 0}, {0, 1}});
    model.stages[static_cast<std::size_t>(i)] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                                                   at::Tensor x = tensor(args, 0);
                                                   if (i > 0) x.mul_(1.5);
                                                   at::Tensor y = at::tanh(at::matmul(x, w));
                                                   if (takes_skip) {
                                                     at::Tensor skip = tensor(args, 1);
                                                     y = y + skip * skip + skip.mul_(0.5);
                                                   }
                                                   if (i == 0 && stages > 1)
                                                     return c10::ivalue::Tuple::create({y, at::sigmoid(y)});
                                                   return y;
                                                 },
                                                 .parameters = {{"w", w}}};
  }
  return model;
}

// A weight that is used twice in its stage.
inline Model shared_inside(int stages, const StageDevices& devices = test_device) {
  Model model(stages, devices);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor w = weight(numbered("inside", i), {kWide, kWide}, devices(i));
    model.stages[static_cast<std::size_t>(i)] = {.forward = [w](const Args& args, const Kwargs&) -> c10::IValue {
                                                   return at::matmul(at::relu(at::matmul(tensor(args, 0), w)), w.t());
                                                 },
                                                 .parameters = {{"w", w}}};
  }
  return model;
}

// A weight that the first and the last stage have in common.
inline Model shared_across(int stages, const StageDevices& devices = test_device) {
  Model model = perceptron(stages, devices);
  const at::Tensor tied = weight("tied", {kWide, kWide}, devices(0));
  // One tensor, or a copy of it on another device.
  const bool is_one = devices(0) == devices(stages - 1);
  const at::Tensor last_tied = is_one ? tied : weight("tied", {kWide, kWide}, devices(stages - 1));
  const auto first = model.stages.front().forward;
  const auto last = model.stages.back().forward;
  model.stages.front().forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    return first({at::matmul(tensor(args, 0), tied)}, kwargs);
  };
  if (stages > 1) {
    model.stages.back().forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      return at::matmul(last(args, kwargs).toTensor(), last_tied.t());
    };
    model.stages.back().parameters.emplace_back("tied", last_tied);
    (is_one ? model.tied : model.copies) = {{{0, "tied"}, {stages - 1, "tied"}}};
  }
  model.stages.front().parameters.emplace_back("tied", tied);
  return model;
}

struct NamedModel {
  const char* name;
  Model (*make_on)(int stages, const StageDevices& devices);
  Model make(int stages) const { return make_on(stages, test_device); }
};
inline constexpr NamedModel kModels[] = {{"perceptron", perceptron},           {"transformer", transformer},
                                         {"several_tensors", several_tensors}, {"with_skips", with_skips},
                                         {"shared_inside", shared_inside},     {"shared_across", shared_across}};

inline at::Tensor squared_error(const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

// Runs one stage on its device.
inline at::Tensor forward_of(const Model& model, std::size_t stage, const at::Tensor& x) {
  return model.stages[stage].forward({x.to(model.devices(static_cast<int>(stage)))}, {}).toTensor();
}
// Runs all stages, one after the other.
inline at::Tensor forward_of(const Model& model, at::Tensor x) {
  for (std::size_t stage = 0; stage < model.stages.size(); ++stage) x = forward_of(model, stage, x);
  return x;
}

// Result of the reference on one microbatch, with gradients by stage and parameter.
struct PlainMicrobatch {
  at::Tensor output;
  at::Tensor loss;
  std::vector<std::vector<at::Tensor>> gradients;
};

struct PlainOptions {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  bool backward = true;
};

inline PlainMicrobatch plain_microbatch(const Model& model, const Args& args, const at::Tensor& target, int microbatch,
                                        double loss_weight, const PlainOptions& options) {
  const c10::AutoGradMode grad(options.backward);
  // The number of intra-op threads changes rounding, and ranks have one.
  const IntraOpThreads one_thread(1);
  // Outputs of each stage. Arguments are copies, as in a pipeline, since stages may write into them.
  std::vector<std::vector<c10::IValue>> outputs;
  c10::IValue value;
  for (std::size_t i = 0; i < model.stages.size(); ++i) {
    Args own = args;
    if (i > 0) {
      own.clear();
      const auto& wired = model.wiring.arguments(static_cast<int>(i));
      if (!wired) {
        own = outputs.back();
      } else {
        for (const StageOutput& one : *wired) {
          own.push_back(outputs.at(static_cast<std::size_t>(one.stage)).at(static_cast<std::size_t>(one.output)));
        }
      }
      for (c10::IValue& one : own) {
        if (one.isTensor()) one = one.toTensor().clone();
      }
    }
    for (c10::IValue& one : own) {
      if (one.isTensor() && one.toTensor().defined()) one = one.toTensor().to(model.devices(static_cast<int>(i)));
    }
    const RandomScope scope(options.seed, options.step, microbatch, static_cast<std::int64_t>(i));
    value = model.stages[i].forward(own, {});
    outputs.push_back(value.isTuple() ? value.toTupleRef().elements().vec() : std::vector<c10::IValue>{value});
  }
  PlainMicrobatch result{.output = value.toTensor().detach(),
                         .loss = squared_error(value, target.to(value.toTensor().device()), {}),
                         .gradients = {}};
  if (!options.backward) return result;
  std::vector<at::Tensor> parameters;
  for (const StageModule& stage : model.stages) {
    for (const auto& [name, parameter] : stage.parameters) parameters.push_back(parameter);
  }
  const auto gradients =
      torch::autograd::grad({result.loss}, parameters, {at::scalar_tensor(loss_weight, result.loss.options())},
                            /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  result.loss = result.loss.detach();
  std::size_t next = 0;
  for (const StageModule& stage : model.stages) {
    auto& own = result.gradients.emplace_back();
    for (std::size_t i = 0; i < stage.parameters.size(); ++i) own.push_back(gradients[next++]);
  }
  return result;
}

// Returns gradients by stage and parameter, summed in the order in which the schedule computes those of each stage.
inline std::vector<std::vector<at::Tensor>> added_up(const Schedule& schedule,
                                                     const std::vector<PlainMicrobatch>& microbatches) {
  std::vector<std::vector<at::Tensor>> sums(static_cast<std::size_t>(schedule.stages()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        if (!part.is_compute() || !makes_weight_gradient(part)) return;
        const auto& own =
            microbatches[static_cast<std::size_t>(part.microbatch)].gradients[static_cast<std::size_t>(part.stage)];
        auto& sum = sums[static_cast<std::size_t>(part.stage)];
        sum.resize(own.size());
        for (std::size_t i = 0; i < own.size(); ++i) {
          if (own[i].defined()) sum[i] = sum[i].defined() ? sum[i] + own[i] : own[i].clone();
        }
      });
    }
  }
  return sums;
}

// Compares values bitwise, whatever the devices are.
inline bool same_tensor(const at::Tensor& one, const at::Tensor& other) {
  return one.defined() == other.defined() && (!one.defined() || at::equal(one.cpu(), other.cpu()));
}

inline at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.cpu() : tensor;
}

// Returns rows for all microbatches, with a different number in the last.
inline at::Tensor rows_for(int microbatches, const std::string& name) {
  return weight(name, {2 * microbatches + (microbatches > 1 ? 1 : 0), 4 * kWide}).detach();
}

// The transformer takes rows of four tokens of 8 numbers, other models rows of 8 numbers.
inline at::Tensor input_for(const NamedModel& model, int microbatches, const std::string& name) {
  const at::Tensor rows = rows_for(microbatches, name);
  return std::string(model.name) == "transformer" ? rows : rows.narrow(1, 0, kWide).contiguous();
}

// Runs the reference on each microbatch of a batch.
inline std::vector<PlainMicrobatch> plain(const Model& model, const at::Tensor& x, const at::Tensor& y,
                                          int microbatches, const PlainOptions& options) {
  const SplitArgs split = split_args_kwargs_into_chunks({x, y}, {}, microbatches);
  std::vector<PlainMicrobatch> results;
  for (int i = 0; i < microbatches; ++i) {
    const Args& own = split.args[static_cast<std::size_t>(i)];
    results.push_back(plain_microbatch(model, {own[0]}, own[1].toTensor(), i, 1.0 / microbatches, options));
  }
  return results;
}

inline at::Tensor outputs_of(const std::vector<PlainMicrobatch>& microbatches) {
  std::vector<at::Tensor> outputs;
  for (const PlainMicrobatch& one : microbatches) outputs.push_back(one.output);
  return at::cat(outputs);
}

inline at::Tensor rows(std::int64_t count, const char* name) {
  return weight(name, {count, kWide}).detach();
}

// Returns the gradients in CPU memory, undefined ones as they are.
inline std::vector<at::Tensor> gradients_of(const Model& model) {
  std::vector<at::Tensor> gradients;
  for (const StageModule& stage : model.stages) {
    for (const auto& [name, parameter] : stage.parameters) gradients.push_back(on_host(parameter.grad()));
  }
  return gradients;
}
inline void zero_grad(const Model& model) {
  for (const StageModule& stage : model.stages) {
    for (const auto& [name, parameter] : stage.parameters) parameter.mutable_grad().reset();
  }
}
inline std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.clone());
  return copies;
}
inline void expect_equal(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_tensor(expected[i], found[i])) << i;
}

// Where a pipeline runs, and the model that one process computes in its place.
struct Setting {
  // Null for thread ranks.
  std::shared_ptr<Transport> transport = nullptr;
  StageDevices devices = test_device;
  // If false, other threads of this process may wait for devices meanwhile, so that waits in the step are not counted.
  bool counts_host_waits = true;
};

// Returns true if a model draws random numbers. Those of a device are not those of the CPU.
inline bool is_random(const NamedModel& named) {
  return std::string(named.name) == "transformer";
}

// Expects that a step of the schedule has the losses, outputs and gradients of one process on the CPU, bitwise, on thread
// ranks or, with a transport, in the stages of this process, and that its host waits for no device. The process that a
// model with random numbers is compared with computes on the device of the first stage. Gradients of a weight that
// several stages share are equal to rounding, as the stages add to them in no fixed order.
inline void expect_what_one_process_gives(const NamedModel& named, const Schedule& schedule,
                                          const Setting& setting = {}) {
  SCOPED_TRACE(named.name);
  const at::Tensor x = input_for(named, schedule.microbatches(), "x");
  const at::Tensor y = input_for(named, schedule.microbatches(), "y");
  const Model model = named.make_on(schedule.stages(), setting.devices);
  PipelineOptions options{.transport = setting.transport, .loss = squared_error};
  StagedModel staged = model.build();
  if (setting.transport != nullptr) {
    const auto own = schedule.placement().stages_of(setting.transport->rank());
    staged = model.build({own.begin(), own.end()});
  }
  Pipeline pipeline(std::move(staged), schedule, options);
  StepOptions everywhere;
  everywhere.results_everywhere = true;
  const std::uint64_t waits = host_waits();
  const StepResult result = pipeline.step({x}, {}, y, everywhere);
  if (setting.counts_host_waits) {
    EXPECT_EQ(host_waits(), waits);
  }

  const at::Device device = is_random(named) ? setting.devices(0) : at::Device(at::kCPU);
  const Model again = named.make_on(schedule.stages(), [&](int) { return device; });
  const std::vector<PlainMicrobatch> expected = plain(again, x.to(device), y.to(device), schedule.microbatches(), {});
  EXPECT_TRUE(same_tensor(outputs_of(expected), result.output.toTensor()));
  ASSERT_EQ(expected.size(), result.losses.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_tensor(expected[i].loss, result.losses[i])) << i;
  const auto sums = added_up(pipeline.schedule(), expected);
  for (const PipelineStage& stage : pipeline.stages()) {
    const auto at = static_cast<std::size_t>(stage.stage_index());
    for (std::size_t i = 0; i < stage.module().parameters.size(); ++i) {
      const auto& [name, parameter] = stage.module().parameters[i];
      if (name == "tied") {
        const at::Tensor found = parameter.grad().cpu();
        EXPECT_LE((sums[at][i].cpu() - found).abs().max().item<double>(),
                  1e-6 * sums[at][i].abs().max().item<double>());
        continue;
      }
      EXPECT_TRUE(same_tensor(sums[at][i], parameter.grad()))
          << "stage " << at << ", " << name << "\nexpected " << sums[at][i] << "\nfound " << parameter.grad();
    }
  }
}

}  // namespace penstock::internal::testing
