// Which tensors of a stage go along which link. A value that several stages take travels from one consumer to the next,
// so a stage sends its own outputs and forwards through some of what it received.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "penstock/stage/wiring.h"

namespace penstock::internal {

// A tensor that goes to another stage.
struct OutgoingTensor {
  // The tensor in this stage's graph, from which its backward starts.
  at::Tensor in_graph;
  // The tensor that is sent: without history, and requiring grad if the other stage has to return a gradient for it.
  at::Tensor sent;
};

// The links of one stage. Immutable.
class StageRouting {
 public:
  StageRouting(const Wiring& wiring, int stage);

  const std::vector<Wiring::Link>& links_out() const { return links_out_; }

  // Returns the arguments of the stage, picked from the tensors of all incoming links. `counts` has the number of
  // tensors that came along each link.
  std::vector<at::Tensor> arguments(const std::vector<at::Tensor>& tensors,
                                    const std::vector<std::size_t>& counts) const;

  // Returns the tensors that the stage forwards through, in the order of outgoing links. `received` has the tensors
  // that came along all links, `tensors` the stage's inputs made of them. Called before the module runs, because the
  // module may write into its inputs: the result has their place in the graph from before, and the memory of
  // `received`. Where the module could write into that memory, it is copied.
  std::vector<OutgoingTensor> forward_through(const std::vector<at::Tensor>& received,
                                              const std::vector<at::Tensor>& tensors,
                                              const std::vector<std::size_t>& counts) const;

  // Returns all tensors that leave the stage, by outgoing link. Copies an output for which `must_copy` is true. Throws
  // StageError if a later stage takes an output that the module did not return.
  std::vector<std::vector<OutgoingTensor>> outgoing(const std::vector<at::Tensor>& outputs,
                                                    std::vector<OutgoingTensor> forwarded,
                                                    const std::function<bool(const at::Tensor&)>& must_copy) const;

 private:
  // Returns the index of a received value among the tensors of all incoming links. Throws StageError if it did not
  // come.
  std::size_t index_of(const StageOutput& value, const std::vector<std::size_t>& counts) const;

  int stage_;
  std::vector<Wiring::Link> links_in_;
  std::vector<Wiring::Link> links_out_;
  // Empty if the stage takes all outputs of the previous one.
  std::optional<std::vector<StageOutput>> arguments_;
};

}  // namespace penstock::internal
