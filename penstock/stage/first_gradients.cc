#include "penstock/stage/first_gradients.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <new>
#include <unordered_set>

#include "penstock/base/mutex.h"

namespace penstock::internal {
namespace {

// Process-wide, since thread ranks of different stages may have a parameter in common. No other lock is acquired while
// this one is held.
struct Registry {
  Mutex mutex;
  std::condition_variable_any changed;
  // Identities of the parameters that a thread is giving their first gradient.
  std::unordered_set<const void*> busy PENSTOCK_GUARDED_BY(mutex);

  bool is_busy(const std::vector<at::Tensor>& parameters) const PENSTOCK_REQUIRES(mutex) {
    if (busy.empty()) return false;
    for (const at::Tensor& parameter : parameters) {
      if (busy.contains(parameter.unsafeGetTensorImpl())) return true;
    }
    return false;
  }
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

FirstGradients::FirstGradients(const std::vector<at::Tensor>& parameters) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  while (all.is_busy(parameters)) all.changed.wait(all.mutex);
  std::ranges::copy_if(parameters, std::back_inserter(parameters_),
                       [](const at::Tensor& parameter) { return !parameter.grad().defined(); });
  try {
    for (const at::Tensor& parameter : parameters_) all.busy.insert(parameter.unsafeGetTensorImpl());
  } catch (const std::bad_alloc&) {
    // Nobody else has seen them, as the lock is held: they must not stay busy.
    for (const at::Tensor& parameter : parameters_) all.busy.erase(parameter.unsafeGetTensorImpl());
    throw;
  }
}

FirstGradients::~FirstGradients() {
  if (parameters_.empty()) return;
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  for (const at::Tensor& parameter : parameters_) all.busy.erase(parameter.unsafeGetTensorImpl());
  all.changed.notify_all();
}

void FirstGradients::copy_shared_storages() const {
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    const bool is_shared = gradient.defined() && gradient.has_storage() && gradient.storage().use_count() > 1;
    if (is_shared) gradient = gradient.clone();
  }
}

}  // namespace penstock::internal
