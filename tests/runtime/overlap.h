// Two stages, on two devices, of which the second computes microbatch 0 while the input of its microbatch 1 is on its way:
// the first stage computes microbatch 1 only when that has begun, and it ends only when the input lies in the memory of
// the second device. So a transfer that is started when its input is needed runs beside the computation, or never ends.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/runtime/pipeline.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {

class OverlappedTransfer {
 public:
  // Number of rows of an input of two microbatches.
  static constexpr std::int64_t kRows = 4;

  OverlappedTransfer() : shared_(std::make_shared<Shared>()) {
    // The memory of an earlier test may be reused, so each has a value of its own.
    static std::atomic<int> uses = 0;
    shared_->value = static_cast<float>(1000 + ++uses);
  }

  at::Tensor input() const { return at::full({kRows, kWide}, shared_->value); }

  StageModule first(at::Device device) const {
    return stage(device, [shared = shared_, device](int microbatch, const at::Tensor& /*input*/) {
      if (microbatch == 1) launch(device, [shared] { wait_until(*shared, [&] { return shared->has_begun.load(); }); });
    });
  }
  StageModule second(at::Device device) const {
    return stage(device, [shared = shared_, device](int microbatch, const at::Tensor& input) {
      if (microbatch == 1) {
        const at::Tensor view = sim::host_view(input);
        shared->arriving = view.const_data_ptr<float>() + view.numel() - 1;
        return;
      }
      launch(device, [shared] {
        std::this_thread::sleep_for(kClocks);
        shared->has_begun = true;
        wait_until(*shared, [&] {
          const volatile float* const arriving = shared->arriving.load();
          return arriving != nullptr && *arriving == shared->value;
        });
        std::this_thread::sleep_for(kClocks);
      });
    });
  }

  // Checks the record of the rank with the second stage.
  void expect_overlap(const Schedule& schedule, const std::vector<ActionRecord>& record) const {
    EXPECT_FALSE(shared_->is_late) << "the input did not arrive while the device computed";
    const auto find = [&](const char* name) {
      for (std::size_t i = 0; i < record.size(); ++i) {
        if (to_string(schedule.actions(1)[i]) == name) return record[i];
      }
      ADD_FAILURE() << "there is no " << name;
      return ActionRecord();
    };
    const ActionRecord beside = find("1F0");
    const ActionRecord received = find("1RECV_F1");
    const ActionRecord user = find("1F1");
    ASSERT_TRUE(received.has_transfer());
    EXPECT_EQ(received.bytes, kRows / 2 * kWide * 4);
    EXPECT_EQ(received.peer, 0);
    EXPECT_LT(received.transfer_start, beside.end);
    EXPECT_GT(received.transfer_end, beside.start + beside.waited);
    EXPECT_LT(received.transfer_end, user.start + user.waited);
  }

 private:
  struct Shared {
    float value = 0;
    std::atomic<bool> has_begun = false;
    // Last element of the input of microbatch 1.
    std::atomic<const volatile float*> arriving = nullptr;
    std::atomic<bool> is_late = false;
  };

  // Longer than the clocks of two devices may differ.
  static constexpr std::chrono::milliseconds kClocks{50};

  template <class IsReady>
  static void wait_until(Shared& shared, const IsReady& is_ready) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!is_ready()) {
      if (shared.is_late || std::chrono::steady_clock::now() > deadline) {
        shared.is_late = true;
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  template <class Kernel>
  static void launch(at::Device device, Kernel kernel) {
    sim::launch(current_stream(device), "gate", {}, std::move(kernel));
  }

  // Returns a stage that passes its input on. Calls prepare(microbatch, input) before.
  template <class Prepare>
  static StageModule stage(at::Device device, Prepare prepare) {
    const at::Tensor w = at::eye(kWide).to(device).requires_grad_();
    return {.forward = [w, prepare, calls = std::make_shared<int>(0)](const Args& args, const Kwargs&) -> c10::IValue {
              prepare((*calls)++, args[0].toTensor());
              return at::matmul(args[0].toTensor(), w);
            },
            .parameters = {{"w", w}}};
  }

  std::shared_ptr<Shared> shared_;
};

}  // namespace penstock::internal::testing
