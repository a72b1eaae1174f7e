#include "penstock/stage/loss_terms.h"

#include <utility>

#include "penstock/stage/stage.h"

namespace penstock {
namespace {

// The terms of the innermost LossTermScope of this thread, which keeps them alive; null outside of one.
thread_local std::vector<at::Tensor>* current_terms = nullptr;

}  // namespace

namespace internal {

LossTermScope::LossTermScope(std::vector<at::Tensor>& terms) : outer_(std::exchange(current_terms, &terms)) {}

LossTermScope::~LossTermScope() {
  current_terms = outer_;
}

}  // namespace internal

void add_loss(const at::Tensor& term) {
  if (current_terms == nullptr) throw StageError("add_loss is called outside of a stage's forward.");
  current_terms->push_back(term);
}

}  // namespace penstock
