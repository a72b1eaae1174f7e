// Steps of which some reduce, with gradients cleared between them, compared with one process. The numbers are small
// integers, so that sums are exact in any order.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {

enum class Sharing { None, Copies, OneTensor };

struct AccumulationCase {
  int replicas = 1;
  bool sharded = false;
  Sharing sharing = Sharing::None;

  std::string name() const {
    static constexpr std::array kNames = {"", "_copies", "_one_tensor"};
    return std::to_string(replicas) + (sharded ? "_sharded" : "_replicated") +
           kNames[static_cast<std::size_t>(sharing)];
  }
};

inline std::vector<AccumulationCase> accumulation_cases() {
  std::vector<AccumulationCase> cases;
  for (const int replicas : {1, 2, 3}) {
    for (const bool sharded : {false, true}) {
      for (const Sharing sharing : {Sharing::None, Sharing::Copies, Sharing::OneTensor}) {
        cases.push_back({replicas, sharded, sharing});
      }
    }
  }
  return cases;
}

// Each stage adds (parameter * pattern).sum() times a number of the row, by parameter; with 0 it does not use the
// parameter. Patterns are such that some shards are zero, or have no elements at all.
class AddingModel {
 public:
  static constexpr std::array kNames = {"long", "late", "one", "tied"};
  static constexpr std::int64_t kColumns = 2 * kNames.size();

  explicit AddingModel(bool tied_is_one_tensor, const StageDevices& devices = test_device) {
    for (int stage = 0; stage < 2; ++stage) {
      auto& own = parameters_.emplace_back();
      for (const char* name : kNames) own[name] = at::ones_like(pattern(name)).to(devices(stage)).requires_grad_();
    }
    if (tied_is_one_tensor) parameters_[1]["tied"] = parameters_[0]["tied"];
  }

  static at::Tensor pattern(const std::string& name) {
    if (name == "long") return at::arange(1, 6, at::kFloat);
    if (name == "late") return at::tensor({0.0F, 0.0F, 0.0F, 0.0F, 1.0F, 2.0F});
    if (name == "one") return at::ones({1});
    return at::tensor({1.0F, 3.0F});
  }

  at::Tensor forward(std::size_t stage, const at::Tensor& x, at::Tensor y) const {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      const auto factor = x[0][static_cast<std::int64_t>(stage * kNames.size() + i)].item<float>();
      if (factor == 0) continue;
      const at::Tensor& parameter = parameters_[stage].at(kNames[i]);
      y = y + (parameter * pattern(kNames[i]).to(parameter.device())).sum() * factor;
    }
    return y;
  }

  Model model() const {
    Model model(2);
    for (std::size_t stage = 0; stage < 2; ++stage) {
      model.stages[stage].forward = [self = *this, stage](const Args& args, const Kwargs&) -> c10::IValue {
        const at::Tensor x = tensor(args, 0);
        const at::Tensor y = self.forward(stage, x, stage == 0 ? at::zeros({1}, x.options()) : tensor(args, 1));
        if (stage == 1) return y;
        return c10::ivalue::Tuple::create({x, y});
      };
      for (const char* name : kNames) model.stages[stage].parameters.emplace_back(name, parameters_[stage].at(name));
    }
    return model;
  }

  const at::Tensor& parameter(std::size_t stage, const std::string& name) const { return parameters_[stage].at(name); }

 private:
  std::vector<std::map<std::string, at::Tensor>> parameters_;
};

enum class Clearing { None, Zero, ZeroData, SetToNone };

inline void clear(const at::Tensor& parameter, Clearing clearing) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (clearing == Clearing::SetToNone) gradient.reset();
  if (clearing == Clearing::Zero && gradient.defined()) gradient.zero_();
  // Does not move the version counter.
  if (clearing == Clearing::ZeroData && gradient.defined()) gradient.data().zero_();
}

// Runs random steps, on threads or, with a transport, in this process's stages, and compares gradients after each one
// that reduces.
inline void expect_accumulation_of_one_process(const AccumulationCase& config, unsigned seed,
                                               const std::shared_ptr<Transport>& transport = nullptr) {
  SCOPED_TRACE(config.name() + ", seed " + std::to_string(seed));
  constexpr int kMicrobatches = 2;
  std::mt19937 random(seed);
  const auto below = [&](unsigned limit) { return static_cast<int>(random() % limit); };
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = kMicrobatches});
  const AddingModel plain(/*tied_is_one_tensor=*/config.sharing != Sharing::None, on_cpu);
  const auto fails = std::make_shared<std::atomic<bool>>(false);

  PipelineOptions options{.transport = transport,
                          .loss = [fails](const c10::IValue& output, const c10::IValue&, const Kwargs&) -> at::Tensor {
                            if (*fails) throw std::runtime_error("no loss");
                            return output.toTensor().sum();
                          },
                          .scale_grads = false,
                          .sharded = config.sharded};
  std::vector<StagedModel> replicas;
  for (int i = 0; i < (transport ? 1 : config.replicas); ++i) {
    Model model = AddingModel(config.sharing == Sharing::OneTensor).model();
    if (config.sharing == Sharing::Copies) model.copies = {{{0, "tied"}, {1, "tied"}}};
    replicas.push_back(transport ? model.build({transport->rank() % 2}) : model.build());
  }
  Pipeline pipeline(std::move(replicas), schedule, options);
  const auto for_each_visible = [&](const auto& visit) {
    for (int replica = 0; replica < pipeline.replicas(); ++replica) {
      for (const PipelineStage& stage : pipeline.stages(replica)) {
        for (const auto& [name, parameter] : stage.parameters()) {
          visit(replica, static_cast<std::size_t>(stage.stage_index()), name, parameter);
        }
      }
    }
  };

  for (int round = 0; round < 16; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    at::Tensor x = at::zeros({static_cast<std::int64_t>(config.replicas) * kMicrobatches, AddingModel::kColumns});
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      // Divisible by the number of replicas.
      if (below(3) == 0) x.view(-1)[i] = 6 * (1 + below(4));
    }
    StepOptions step;
    step.reduce = round % 8 == 7 || below(2) == 0;
    at::Tensor own = x;
    if (transport) own = x.chunk(config.replicas)[static_cast<std::size_t>(transport->rank() / 2)];
    if (!transport && below(4) == 0) {
      *fails = true;
      EXPECT_THROW(pipeline.step({own}, {}, at::Tensor(), step), PipelineError);
      *fails = false;
    }
    if (below(4) == 0) pipeline.eval({own});
    pipeline.step({own}, {}, at::Tensor(), step);

    for (std::int64_t row = 0; row < x.size(0); ++row) {
      const at::Tensor part = x.narrow(0, row, 1);
      const at::Tensor loss = plain.forward(1, part, plain.forward(0, part, at::zeros({1}))).sum() / config.replicas;
      if (loss.requires_grad()) loss.backward();
    }
    if (step.reduce) {
      for_each_visible([&](int replica, std::size_t stage, const std::string& name, const at::Tensor& parameter) {
        const at::Tensor like = AddingModel::pattern(name);
        const at::Tensor gradient = plain.parameter(stage, name).grad();
        at::Tensor expected = gradient.defined() ? gradient : at::zeros_like(like);
        const bool shared = name == "tied" && config.sharing != Sharing::None;
        if (config.sharded && config.replicas > 1 && !shared) {
          const int member = transport ? transport->rank() / 2 : replica;
          expected = at::constant_pad_nd(expected, {0, config.replicas * parameter.numel() - like.numel()})
                         .narrow(0, member * parameter.numel(), parameter.numel());
        }
        const at::Tensor found = parameter.grad().defined() ? parameter.grad() : at::zeros_like(expected);
        EXPECT_TRUE(same_tensor(expected, found)) << "replica " << replica << ", stage " << stage << ", " << name
                                                  << "\nexpected " << expected << "\nfound " << found;
      });
      if (::testing::Test::HasFailure()) return;
    }

    // Some parameters alone, or all of them.
    auto clearing = std::array{Clearing::None, Clearing::Zero, Clearing::ZeroData, Clearing::SetToNone}[below(4)];
    // The shards of some ranks have no elements, and the host does not look at the values of a device.
    if (clearing == Clearing::ZeroData && (config.sharded || is_on_devices())) clearing = Clearing::Zero;
    const std::string only = below(2) == 0 ? AddingModel::kNames[below(AddingModel::kNames.size())] : "";
    for_each_visible([&](int, std::size_t, const std::string& name, const at::Tensor& parameter) {
      if (only.empty() || name == only) clear(parameter, clearing);
    });
    for (std::size_t stage = 0; stage < 2; ++stage) {
      for (const char* name : AddingModel::kNames) {
        if (only.empty() || name == only) clear(plain.parameter(stage, name), clearing);
      }
    }
  }
}

}  // namespace penstock::internal::testing
