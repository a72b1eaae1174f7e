#include "penstock/device/generators.h"

#include <ATen/Context.h>

#include <array>
#include <cstddef>

namespace penstock::internal {
namespace {

// One for each device index, and one for those beyond.
std::recursive_mutex& mutex_of(at::Device device) {
  static std::array<std::recursive_mutex, 65> mutexes;
  const auto index = static_cast<std::size_t>(device.index());
  return mutexes.at(index < mutexes.size() ? index : mutexes.size() - 1);
}

void set_position(at::Generator& generator, std::uint64_t seed, std::uint64_t offset) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

}  // namespace

at::Generator make_generator(at::Device device, std::uint64_t seed) {
  at::Generator generator =
      at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  set_position(generator, seed, 0);
  return generator;
}

DefaultGeneratorScope::DefaultGeneratorScope(at::Device device, at::Generator& generator)
    : generator_(generator),
      default_(at::globalContext().defaultGenerator(device)),
      lock_(mutex_of(device)),
      seed_before_(default_.current_seed()),
      offset_before_(default_.get_offset()) {
  set_position(default_, generator_.current_seed(), generator_.get_offset());
}

DefaultGeneratorScope::~DefaultGeneratorScope() {
  generator_.set_offset(default_.get_offset());
  set_position(default_, seed_before_, offset_before_);
}

}  // namespace penstock::internal
