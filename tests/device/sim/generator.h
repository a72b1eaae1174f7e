// Generators of the device's random numbers. Their state is a seed and an offset, as CUDA's: an operator takes both when
// it is launched, and advances the offset.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace penstock::sim {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex device);

  // Sets the offset to 0.
  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  // The state is 16 bytes on the CPU.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // Returns the generator that the CPU's kernel of one operator draws from, and advances the offset.
  at::Generator draw();

 private:
  SimGenerator* clone_impl() const override;

  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t offset_ = 0;
};

// Returns the default generator of a device, the current one for −1.
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace penstock::sim
