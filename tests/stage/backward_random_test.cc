// Random stages: graphs of all kinds of operations that a split backward treats differently, run whole by autograd,
// whole by StageBackward and in halves. PENSTOCK_SEED and PENSTOCK_CASES set the seed and the number of graphs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/stage/functions.h"
#include "tests/stage/stages.h"

namespace penstock::internal::testing {
namespace {

// Number of cases with each feature.
using Counts = std::map<std::string, int>;

// The forward of one random stage. The same random numbers give the same operations. All values are 4 x 4 matrices.
class Draw {
 public:
  Draw(Random random, const Tensors& inputs, const Tensors& parameters)
      : random_(std::move(random)), in_(inputs), p_(parameters), values_(inputs.begin(), inputs.begin() + 2) {}

  Tensors outputs() {
    if (random_.percent(15)) write_to_input();
    for (std::int64_t left = random_.between(1, 14); left > 0; --left) step();
    Tensors result;
    for (std::int64_t left = random_.between(1, 4); left > 0; --left) result.push_back(output());
    if (random_.percent(15)) {
      note("an output twice");
      result.push_back(result.front());
    }
    return result;
  }

  // Returns the features of the graph, each with a count of 1.
  const Counts& seen() const { return seen_; }

  static std::vector<std::string> names() {
    std::vector<std::string> result;
    for (const auto& [name, act] : steps()) result.push_back(name);
    return result;
  }

 private:
  using Step = std::pair<std::string, std::function<void(Draw&)>>;

  void note(const std::string& what) { seen_[what] = 1; }

  at::Tensor matrix() { return p_[static_cast<std::size_t>(random_.between(0, 2))]; }
  // Returns a late value more often than an early one, so that graphs are deep.
  at::Tensor value() {
    const auto count = static_cast<std::int64_t>(values_.size());
    const std::int64_t back = random_.percent(60) ? random_.between(1, 2) : random_.between(1, count);
    return values_[static_cast<std::size_t>(count - back)];
  }
  // Returns a value or a parameter.
  at::Tensor any() { return random_.percent(20) ? matrix() : value(); }
  void add(const at::Tensor& tensor) { values_.push_back(tensor); }

  void step() {
    const auto& [name, act] =
        steps()[static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(steps().size()) - 1))];
    note(name);
    act(*this);
    if (random_.percent(10) && values_.back().requires_grad()) {
      note("a hook");
      values_.back().register_hook(
          [](const at::Tensor& gradient) { return gradient.defined() ? gradient * 0.5 : gradient; });
    }
  }

  static const std::vector<Step>& steps() {
    static const std::vector<Step> kAll = {
        {"mm", [](Draw& d) { d.add(d.any().mm(d.any())); }},
        {"linear", [](Draw& d) { d.add(at::linear(d.value(), d.matrix(), d.p_[3])); }},
        {"addmm", [](Draw& d) { d.add(at::addmm(d.any(), d.any(), d.any())); }},
        {"bmm", [](Draw& d) { d.add(at::bmm(d.any().unsqueeze(0), d.any().unsqueeze(0))[0]); }},
        {"mv", [](Draw& d) { d.add(d.any().mv(d.p_[3]).expand({4, 4})); }},
        {"convolution", [](Draw& d) { d.add(at::conv1d(d.value().unsqueeze(0), d.p_[8], d.p_[3], 1, 1)[0]); }},
        {"a product", [](Draw& d) { d.add(d.any() * d.any()); }},
        {"a broadcast", [](Draw& d) { d.add(d.value() * d.p_[3] + d.p_[3].unsqueeze(1)); }},
        {"sin", [](Draw& d) { d.add(d.value().sin()); }},
        {"sigmoid", [](Draw& d) { d.add(d.value().sigmoid()); }},
        {"a view", [](Draw& d) { d.add(d.value().t()); }},
        {"a view of a sum", [](Draw& d) { d.add((d.any() + d.any()).contiguous().view({16}).view({4, 4})); }},
        {"split",
         [](Draw& d) {
           const auto parts = d.value().split(2);
           d.add(at::mm(parts[0].t(), parts[1]));
         }},
        {"unbind and stack",
         [](Draw& d) {
           const auto rows = d.value().unbind();
           d.add(at::stack({rows[2], d.p_[3], rows[0], rows[2]}));
         }},
        {"the maximum with its indices",
         [](Draw& d) {
           const auto [values, indices] = d.value().max(1, /*keepdim=*/true);
           d.add(values * d.any() + indices);
         }},
        {"cat", [](Draw& d) { d.add(at::cat({d.any(), d.any()}, 1).narrow(1, 2, 4)); }},
        {"layer norm", [](Draw& d) { d.add(at::layer_norm(d.value(), {4}, d.p_[3], d.p_[9])); }},
        {"prelu", [](Draw& d) { d.add(at::prelu(d.value(), d.p_[3])); }},
        {"where", [](Draw& d) { d.add(at::where(d.in_[3], d.any(), d.any())); }},
        {"embedding", [](Draw& d) { d.add(at::embedding(d.any(), d.in_[2])); }},
        {"attention",
         [](Draw& d) {
           const auto heads = [&] { return d.any().unsqueeze(0).unsqueeze(0); };
           d.add(at::scaled_dot_product_attention(heads(), heads(), heads())[0][0]);
         }},
        {"an lstm",
         [](Draw& d) {
           const at::Tensor state = d.any().narrow(0, 1, 1).unsqueeze(0).contiguous();
           const auto out =
               std::get<0>(at::lstm(d.any().unsqueeze(1), {state, state}, {d.p_[4], d.p_[5], d.p_[6], d.p_[7]},
                                    /*has_biases=*/true, 1, 0.0, /*train=*/true, false, false));
           d.add(out.squeeze(1));
         }},
        {"a custom function with two outputs",
         [](Draw& d) {
           const auto two = TwoProducts::apply(d.any(), d.any());
           d.add(two[0]);
           if (d.random_.percent(50)) d.add(two[1]);
         }},
        {"a custom function that returns the incoming gradient", [](Draw& d) { d.add(Sum::apply(d.any(), d.any())); }},
        {"a chain before a parameter", [](Draw& d) { d.add(d.matrix().t().sigmoid().mm(d.matrix()).pow(2)); }},
        {"in place",
         [](Draw& d) {
           const at::Tensor sum = d.any() + d.any();
           sum.mul_(d.any());
           d.add(sum);
         }},
        {"in place on a view",
         [](Draw& d) {
           const at::Tensor sum = d.any() + d.any();
           const at::Tensor part = d.random_.percent(50) ? sum.t().narrow(0, 1, 2) : sum.narrow(0, 1, 2);
           const at::Tensor other = d.any().narrow(0, 2, 2);
           switch (d.random_.between(0, 2)) {
             case 0: part.mul_(other); break;
             case 1: part.copy_(other); break;
             default: part.add_(other); break;
           }
           d.add(sum);
         }},
        {"a view of what is written to",
         [](Draw& d) {
           const at::Tensor sum = d.any() + d.any();
           const at::Tensor view = sum.t();
           sum.mul_(d.any());
           d.add(view);
           d.add(sum);
         }},
    };
    return kAll;
  }

  // Called before all other steps, because a tensor that autograd has saved must not be written to.
  void write_to_input() {
    const at::Tensor& x = in_[0];
    if (random_.percent(50)) {
      note("an input written to");
      x.mul_(random_.percent(50) ? matrix() : in_[1]);
    } else {
      note("a view of an input written to");
      x.select(1, 2).mul_(p_[3]);
    }
  }

  at::Tensor output() {
    switch (random_.between(0, 9)) {
      case 0: note("an output that is an input"); return in_[static_cast<std::size_t>(random_.between(0, 1))];
      case 1: note("an output that is a view"); return value().narrow(0, 1, 2);
      case 2: note("an output that is a parameter"); return matrix();
      case 3: note("an output of a parameter only"); return p_[3] * 3;
      case 4: note("an output that needs no gradient"); return random_.percent(50) ? value().detach() : in_[2];
      case 5: note("a loss"); return value().pow(2).mean();
      default: note("an output"); return values_[values_.size() - 1 - static_cast<std::size_t>(random_.between(0, 1))];
    }
  }

  Random random_;
  const Tensors& in_;
  const Tensors& p_;
  Tensors values_;
  Counts seen_;
};

// The forward sets `seen` to the features of its graph.
Stage random_stage(Random random, const std::shared_ptr<Counts>& seen) {
  Stage stage;
  stage.received = {numbers({4, 4}, 1), numbers({4, 4}, 2), at::tensor({3, 0, 1, 0}, at::kLong).to(test_device(0)),
                    numbers({4, 4}, 3) > 0};
  stage.parameters = {numbers({4, 4}, 4),     numbers({4, 4}, 5),  numbers({4, 4}, 6), numbers({4}, 7),
                      numbers({16, 4}, 8),    numbers({16, 4}, 9), numbers({16}, 10),  numbers({16}, 11),
                      numbers({4, 4, 3}, 12), numbers({4}, 13)};
  stage.needs_grad = {random.percent(85), random.percent(70), true, true};
  stage.microbatches = static_cast<int>(random.between(1, 2));
  for (std::size_t i = 0; i < 5; ++i) {
    if (random.percent(15)) stage.without_gradient.push_back(i);
  }
  stage.forward = [random, seen](const Tensors& inputs, const Tensors& parameters) {
    Draw draw(random, inputs, parameters);
    Tensors outputs = draw.outputs();
    *seen = draw.seen();
    return outputs;
  };
  return stage;
}

// Notes the features that only the gradients show.
void note_gradients(const Stage& stage, const Gradients& halves, Counts& seen) {
  const bool first = stage.needs_grad[0];
  const bool second = stage.needs_grad[1];
  const Tensors& inputs = halves.inputs[0];
  if (!first && !second) seen["no input that needs a gradient"] = 1;
  if (first != second) seen["one input that needs a gradient"] = 1;
  if ((first && !inputs[0].defined()) || (second && !inputs[1].defined())) seen["an input that is not used"] = 1;
  if (!halves.first.empty() && !halves.second.empty()) seen["operators in both halves"] = 1;
  if (halves.first.empty() && !halves.second.empty()) seen["operators in the second half only"] = 1;
  if (!stage.without_gradient.empty()) seen["an output without a gradient"] = 1;
  if (stage.microbatches > 1) seen["several microbatches"] = 1;
}

TEST(StageBackward, GivesTheSameInHalvesOfRandomGraphs) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 1);
  const std::uint64_t cases = from_environment("PENSTOCK_CASES", 2'000);
  std::cout << cases << " graphs, PENSTOCK_SEED=" << seed << "\n";
  Counts counts;
  for (const std::string& name : Draw::names()) counts[name] = 0;
  for (std::uint64_t number = 0; number < cases; ++number) {
    const auto seen = std::make_shared<Counts>();
    const Stage stage = random_stage(Random(seed, number), seen);
    SCOPED_TRACE("graph " + std::to_string(number));
    const Gradients halves = expect_same_in_halves(stage);
    if (HasFailure()) return;
    note_gradients(stage, halves, *seen);
    for (const auto& [name, times] : *seen) counts[name] += times;
  }
  for (const char* name :
       {"a hook", "an input written to", "a view of an input written to", "an output twice",
        "an output that is an input", "an output that is a view", "an output that is a parameter",
        "an output of a parameter only", "an output that needs no gradient", "a loss", "no input that needs a gradient",
        "one input that needs a gradient", "an input that is not used", "operators in both halves",
        "operators in the second half only", "an output without a gradient", "several microbatches"}) {
    counts.emplace(name, 0);
  }
  for (const auto& [name, times] : counts) {
    std::cout << times << "\t" << name << "\n";
    // A small number of graphs may miss a feature.
    EXPECT_TRUE(times > 0 || cases < 1'000) << name;
  }
}

}  // namespace
}  // namespace penstock::internal::testing
