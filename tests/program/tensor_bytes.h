// Measures the memory of tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock::internal::testing {

// Counts the bytes of CPU tensors that this thread allocates and frees during its lifetime.
class TensorBytes {
 public:
  TensorBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  std::int64_t now() const { return counter_->now; }
  std::int64_t most() const { return counter_->most; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*data*/, std::int64_t size, std::size_t /*total*/, std::size_t /*reserved*/,
                           c10::Device /*device*/) override {
      now += size;
      most = std::max(most, now);
    }
    bool memoryProfilingEnabled() const override { return true; }

    std::int64_t now = 0;
    std::int64_t most = 0;
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};

}  // namespace penstock::internal::testing
