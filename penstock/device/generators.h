// Generators of random numbers on devices. A device's generator is a seed and an offset in the stream of that seed, so
// that its state can be read and set without waiting for the device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

namespace penstock::internal {

// Returns a generator of a device with streams, at the beginning of the stream of `seed`.
at::Generator make_generator(at::Device device, std::uint64_t seed);

// Makes the device's default generator draw what `generator` would draw next, until it is destroyed; `generator` then
// continues behind what was drawn, and the default generator as if nothing had been drawn. For operators that take no
// generator. Scopes of one device exclude each other; they nest on one thread.
class DefaultGeneratorScope {
 public:
  // `generator` belongs to `device`, and outlives the scope.
  DefaultGeneratorScope(at::Device device, at::Generator& generator);
  ~DefaultGeneratorScope();
  DefaultGeneratorScope(const DefaultGeneratorScope&) = delete;
  DefaultGeneratorScope& operator=(const DefaultGeneratorScope&) = delete;

 private:
  at::Generator& generator_;
  at::Generator default_;
  std::unique_lock<std::recursive_mutex> lock_;
  std::uint64_t seed_before_;
  std::uint64_t offset_before_;
};

}  // namespace penstock::internal
