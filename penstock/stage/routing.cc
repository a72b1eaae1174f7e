#include "penstock/stage/routing.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/stage/copy_on_write.h"

namespace penstock::internal {
namespace {

// Returns the tensor without history, in the same memory unless it is to be copied.
at::Tensor to_send(const at::Tensor& tensor, bool copy) {
  if (!tensor.defined()) return tensor;
  at::Tensor result = copy ? tensor.detach().clone() : tensor.variable_data();
  if (tensor.requires_grad()) result.requires_grad_();
  return result;
}

// Returns a tensor with the same gradient edge, which stays as it is when the stage writes into the tensor.
at::Tensor with_same_edge(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return tensor;
  at::Tensor result = tensor.variable_data();
  torch::autograd::impl::set_gradient_edge(result, torch::autograd::impl::gradient_edge(tensor));
  return result;
}

}  // namespace

StageRouting::StageRouting(const Wiring& wiring, int stage)
    : stage_(stage),
      links_in_(wiring.links_to(stage)),
      links_out_(wiring.links_from(stage)),
      arguments_(wiring.arguments(stage)) {}

std::size_t StageRouting::index_of(const StageOutput& value, const std::vector<std::size_t>& counts) const {
  std::size_t first = 0;
  for (std::size_t link = 0; link < links_in_.size(); ++link) {
    const auto& values = links_in_[link].values;
    if (!values) {
      if (value.stage == links_in_[link].from && static_cast<std::size_t>(value.output) < counts[link]) {
        return first + static_cast<std::size_t>(value.output);
      }
    } else {
      const auto found = std::find(values->begin(), values->end(), value);
      if (found != values->end()) return first + static_cast<std::size_t>(found - values->begin());
    }
    first += counts[link];
  }
  throw StageError(concat("stage ", stage_, " takes output ", value.output, " of stage ", value.stage,
                          ", which that stage does not return."));
}

std::vector<at::Tensor> StageRouting::arguments(const std::vector<at::Tensor>& tensors,
                                                const std::vector<std::size_t>& counts) const {
  if (!arguments_) return tensors;
  std::vector<at::Tensor> result;
  for (const StageOutput& value : *arguments_) result.push_back(tensors[index_of(value, counts)]);
  return result;
}

std::vector<OutgoingTensor> StageRouting::forward_through(const std::vector<at::Tensor>& received,
                                                          const std::vector<at::Tensor>& tensors,
                                                          const std::vector<std::size_t>& counts) const {
  std::vector<OutgoingTensor> forwarded;
  for (const Wiring::Link& link : links_out_) {
    if (!link.values) continue;
    for (const StageOutput& value : *link.values) {
      if (value.stage == stage_) continue;
      const std::size_t index = index_of(value, counts);
      // A write to a copy-on-write alias leaves the received memory as it is.
      const bool is_alias = tensors[index].defined() && is_copy_on_write_alias(tensors[index]);
      forwarded.push_back({with_same_edge(tensors[index]), to_send(received[index], /*copy=*/!is_alias)});
    }
  }
  return forwarded;
}

std::vector<std::vector<OutgoingTensor>> StageRouting::outgoing(
    const std::vector<at::Tensor>& outputs, std::vector<OutgoingTensor> forwarded,
    const std::function<bool(const at::Tensor&)>& must_copy) const {
  const auto outgoing_output = [&](const at::Tensor& output) {
    return OutgoingTensor{output, to_send(output, output.defined() && must_copy(output))};
  };
  auto next_forwarded = forwarded.begin();
  std::vector<std::vector<OutgoingTensor>> by_link;
  for (const Wiring::Link& link : links_out_) {
    std::vector<OutgoingTensor>& tensors = by_link.emplace_back();
    if (!link.values) {
      std::transform(outputs.begin(), outputs.end(), std::back_inserter(tensors), outgoing_output);
      continue;
    }
    for (const StageOutput& value : *link.values) {
      if (value.stage != stage_) {
        tensors.push_back(std::move(*next_forwarded++));
        continue;
      }
      if (static_cast<std::size_t>(value.output) >= outputs.size()) {
        throw StageError(concat("stage ", stage_, " returns ", outputs.size(), " outputs; stage ", link.to,
                                " takes output ", value.output, "."));
      }
      tensors.push_back(outgoing_output(outputs[static_cast<std::size_t>(value.output)]));
    }
  }
  return by_link;
}

}  // namespace penstock::internal
