#include "penstock/tensor/attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/tensor/attention/pass.h"
#include "penstock/tensor/attention/plan.h"

namespace penstock {

using internal::attention_backward;
using internal::attention_forward;
using internal::AttentionGradients;
using internal::AttentionOutput;
using internal::AttentionPlan;
using internal::AttentionProblem;
using internal::concat;
using internal::shape_text;
using internal::TextPart;

namespace {

// The arguments of a call besides its tensors. The autograd graph keeps them for the backward.
struct Call : torch::CustomClassHolder {
  ScoreMod score_mod;
  std::optional<BlockMask> block_mask;
  // The plan of a call without a mask.
  std::optional<AttentionPlan> unmasked_plan;
  double scale = 1;
  std::vector<at::Tensor> captured;

  const AttentionPlan& plan() const { return block_mask ? internal::plan_of(*block_mask) : *unmasked_plan; }
};

// Returns the dtype in which attention on inputs of `type` is computed.
at::ScalarType computed_in(at::ScalarType type) {
  return type == at::kBFloat16 ? at::kFloat : type;
}

AttentionProblem problem_of(const Call& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::ScalarType type = computed_in(query.scalar_type());
  return {.query = query.detach().to(type),
          .key = key.detach().to(type),
          .value = value.detach().to(type),
          .scale = call.scale,
          .score_mod = call.score_mod,
          .plan = call.plan()};
}

// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as torch documents Function
class FlexAttention : public torch::autograd::Function<FlexAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, at::TensorList /*captured*/,
                            const c10::intrusive_ptr<Call>& call) {
    const AttentionOutput output = attention_forward(problem_of(*call, query, key, value));
    const at::Tensor out = output.out.to(query.scalar_type());
    context->save_for_backward({query, key, value, out, output.logsumexp});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grad_outputs) {
    const auto capsule = context->saved_data["call"].toCapsule();
    const Call& call = static_cast<const Call&>(*capsule);
    const std::size_t inputs = 3 + call.captured.size();
    torch::autograd::variable_list gradients(inputs + 1);
    if (!grad_outputs[0].defined()) return gradients;

    const auto saved = context->get_saved_variables();
    {
      const at::NoGradGuard no_graph;
      const at::ScalarType type = saved[0].scalar_type();
      const AttentionOutput output = {.out = saved[3].detach().to(computed_in(type)), .logsumexp = saved[4]};
      const AttentionGradients found = attention_backward(
          problem_of(call, saved[0], saved[1], saved[2]), output, grad_outputs[0].detach().to(computed_in(type)),
          call.captured, {context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2)});
      if (found.query.defined()) gradients[0] = found.query.to(type);
      if (found.key.defined()) gradients[1] = found.key.to(type);
      if (found.value.defined()) gradients[2] = found.value.to(type);
      std::copy(found.captured.begin(), found.captured.end(), gradients.begin() + 3);
    }
    if (at::GradMode::is_enabled()) forbid_double_backward(gradients, {saved[0], saved[1], saved[2], grad_outputs[0]});
    return gradients;
  }

 private:
  // Makes a double backward throw, as its gradients would be wrong.
  static void forbid_double_backward(torch::autograd::variable_list& gradients,
                                     const torch::autograd::variable_list& from) {
    const auto refusal = c10::make_intrusive<torch::autograd::Error>(
        "flex_attention: its gradients cannot be differentiated again.", torch::autograd::collect_next_edges(from));
    for (at::Tensor& gradient : gradients) {
      if (gradient.defined()) torch::autograd::set_history(gradient, refusal);
    }
  }
};

template <TextPart... Parts>
[[noreturn]] void fail(const Parts&... problem) {
  throw AttentionError(concat("flex_attention: ", problem...));
}

void check_types(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const std::pair<const char*, const at::Tensor&> named[] = {{"query", query}, {"key", key}, {"value", value}};
  for (const auto& [name, tensor] : named) {
    if (!tensor.defined()) fail(name, " is undefined; it should be a tensor.");
    if (tensor.dim() != 4) {
      fail(name, " has shape ", shape_text(tensor.sizes()), "; it should be [batch, heads, length, size].");
    }
    const at::ScalarType type = tensor.scalar_type();
    if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16) {
      fail(name, " is of ", c10::toString(type), "; it should be of Float, Double or BFloat16.");
    }
    if (type != query.scalar_type()) {
      fail(name, " is of ", c10::toString(type), " and query of ", c10::toString(query.scalar_type()),
           "; they should be of the same type.");
    }
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
      fail(name, " is a tensor of ", tensor.toString(), "; it should be a dense one on the CPU.");
    }
  }
}

void check_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool enable_gqa) {
  const std::string shapes = concat("query ", shape_text(query.sizes()), ", key ", shape_text(key.sizes()),
                                    " and value ", shape_text(value.sizes()));
  if (query.size(3) != key.size(3)) fail(shapes, ": query and key should have the same last dimension.");
  if (key.size(2) != value.size(2)) fail(shapes, ": key and value should have the same length.");
  if (key.size(1) != value.size(1)) fail(shapes, ": key and value should have the same number of heads.");
  for (const at::Tensor& tensor : {key, value}) {
    if (tensor.size(0) != query.size(0) && tensor.size(0) != 1) {
      fail(shapes, ": key and value should have the query's batch, or 1.");
    }
  }
  if (!enable_gqa && query.size(1) != key.size(1)) {
    fail(shapes, ": query and key should have the same number of heads.\n  Hint: enable_gqa lets heads share keys.");
  }
  if (key.size(1) == 0 ? query.size(1) != 0 : query.size(1) % key.size(1) != 0) {
    fail(shapes, ": the query's heads should be a multiple of the key's.");
  }
}

void check_mask(const BlockMask& mask, const at::Tensor& query, const at::Tensor& key) {
  if (!mask.kv_indices().is_cpu()) {
    fail("block_mask is on ", mask.kv_indices().device().str(), "; it should be on the CPU.");
  }
  const auto fits = [](std::int64_t size, std::int64_t whole) { return size == 1 || size == whole; };
  if (!fits(mask.batch(), query.size(0)) || !fits(mask.heads(), query.size(1)) ||
      mask.seq_lengths() != SeqLengths{.q = query.size(2), .kv = key.size(2)}) {
    fail("block_mask is for ", shape_text(mask.shape()), "; it should be for ",
         shape_text(std::array{query.size(0), query.size(1), query.size(2), key.size(2)}),
         ", or have batch or heads 1.");
  }
}

// Refuses a score_mod that uses a tensor which requires grad but is not in `captured`: it would silently get no
// gradient.
void check_captures(const ScoreMod& score_mod, const at::Tensor& query, at::TensorList captured) {
  if (!score_mod || !captured.empty() || !at::GradMode::is_enabled()) return;
  const at::TensorOptions options = query.options().dtype(computed_in(query.scalar_type()));
  const at::Tensor index = at::zeros({1, 1, 1, 1}, at::kLong);
  const at::Tensor modified = score_mod(at::zeros({1, 1, 1, 1}, options), index, index, index, index);
  if (modified.defined() && modified.requires_grad()) {
    fail("score_mod uses a tensor that requires grad.\n  Hint: list such tensors in `captured`.");
  }
}

}  // namespace

at::Tensor flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ScoreMod& score_mod, const std::optional<BlockMask>& block_mask,
                          std::optional<double> scale, bool enable_gqa, at::TensorList captured) {
  check_types(query, key, value);
  check_shapes(query, key, value, enable_gqa);
  if (block_mask) check_mask(*block_mask, query, key);
  if (query.numel() > 0 && key.numel() > 0) check_captures(score_mod, query, captured);

  auto call = c10::make_intrusive<Call>();
  call->score_mod = score_mod;
  call->block_mask = block_mask;
  if (!block_mask) call->unmasked_plan.emplace(query.size(2), key.size(2));
  call->scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  call->captured = captured.vec();
  const std::vector<std::int64_t> batches = {query.size(0), -1, -1, -1};
  return FlexAttention::apply(query, key.expand(batches), value.expand(batches), captured, call);
}

}  // namespace penstock
