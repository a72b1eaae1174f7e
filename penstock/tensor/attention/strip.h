// The parts that the forward and the backward of attention share: scratch memory for the scores of a strip of queries
// and a run of keys, products on it, and the distribution of work over threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>

#include "penstock/tensor/attention/pass.h"
#include "penstock/tensor/attention/plan.h"
#include "penstock/tensor/attention/rows.h"
#include "penstock/tensor/intra_op_threads.h"

namespace penstock::internal {

// Computes to = beta * to + alpha * a · b, below autograd: threads of the intra-op pool do not have the caller's grad
// mode.
inline void add_product(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b, double beta, double alpha = 1) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.addmm_(a, b, beta, alpha);
}

// Returns one head of a batch row, [queries or keys, E].
inline at::Tensor head_of(const at::Tensor& tensor, std::int64_t batch, std::int64_t head) {
  return tensor.select(0, batch).select(0, head);
}

// Scratch memory for the scores of a strip and a run.
template <class Real>
class Scratch {
 public:
  explicit Scratch(const at::TensorOptions& options)
      : memory_(at::empty({AttentionPlan::kMaxRows, AttentionPlan::kMaxKeys}, options)) {}

  // Returns the scores as a tensor, or as rows for the functions of rows.h.
  at::Tensor view(const AttentionPlan::Strip& strip, const AttentionPlan::Run& run) const {
    return memory_.narrow(0, 0, strip.rows).narrow(1, 0, run.keys);
  }
  Real* data() const { return memory_.mutable_data_ptr<Real>(); }
  Rows<Real> rows(const AttentionPlan::Strip& strip, const AttentionPlan::Run& run) const {
    return {.data = data(), .rows = strip.rows, .columns = run.keys, .stride = AttentionPlan::kMaxKeys};
  }

 private:
  static_assert(AttentionPlan::kMaxKeys % kRowPadding == 0);
  at::Tensor memory_;
};

// Sets the scores of a run to -∞ where the mask forbids attention.
template <class Real>
void mask_parts(const AttentionPlan& plan, const AttentionPlan::Run& run, Rows<Real> scores) {
  for (std::size_t i = 0; i < plan.parts(run); ++i) mask_scores(scores, plan.part(run, i));
}

// Calls work(begin, end) for parts of [0, count), on the intra-op threads unless there is a score_mod. Products use one
// MKL thread each: MKL rounds differently inside of a parallel region than outside unless the number of threads is
// fixed.
template <class Work>
void parallel_work(const AttentionProblem& problem, std::int64_t count, const Work& work) {
  if (count == 0) return;
  if (problem.score_mod) {
    work(0, count);
  } else {
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      const IntraOpThreads single_thread(1);
      work(begin, end);
    });
  }
}

}  // namespace penstock::internal
