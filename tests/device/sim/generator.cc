#include "tests/device/sim/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <mutex>
#include <vector>

#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// Numbers that one operator advances the offset by: CUDA's offsets are multiples of four.
constexpr std::uint64_t kOffsetOfAnOperator = 4;

using State = std::array<std::uint64_t, 2>;

// The finaliser of splitmix64, so that neighbouring offsets give unrelated seeds.
std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31U);
}

}  // namespace

SimGenerator::SimGenerator(c10::DeviceIndex device)
    : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void SimGenerator::set_current_seed(std::uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void SimGenerator::set_offset(std::uint64_t offset) {
  offset_ = offset;
}
std::uint64_t SimGenerator::get_offset() const {
  return offset_;
}
std::uint64_t SimGenerator::current_seed() const {
  return seed_;
}

std::uint64_t SimGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void SimGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == sizeof(State) && state.dtype() == at::kByte && state.is_cpu() && state.is_contiguous(),
              "sim: the state of a generator is ", sizeof(State), " bytes on the CPU");
  State values{};
  std::memcpy(values.data(), state.data(), sizeof(State));
  seed_ = values[0];
  offset_ = values[1];
}

c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  const State values{seed_, offset_};
  const at::Tensor state = at::empty({static_cast<std::int64_t>(sizeof(State))}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), values.data(), sizeof(State));
  return state.getIntrusivePtr();
}

SimGenerator* SimGenerator::clone_impl() const {
  auto* const copy = new SimGenerator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator SimGenerator::draw() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t seed = mix(mix(seed_) + offset_);
  offset_ += kOffsetOfAnOperator;
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* created = new std::vector<at::Generator>;
    for (int index = 0; index < Simulation::get().options().devices; ++index) {
      created->push_back(at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(index)));
    }
    return created;
  }();
  return generators->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

}  // namespace penstock::sim
