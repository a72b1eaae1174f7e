// Reproducible random numbers for dropout and other random operators. libtorch has one CPU generator for the process,
// and dropout, attention and LSTM accept no other, so with thread ranks the numbers would depend on the order of
// execution. While a RandomScope exists on a thread, every random operator called on that thread draws from the scope's
// generator instead, which is seeded by (seed, step, microbatch, place). A scope with the same four numbers gives the
// same random numbers again.
//
//   at::Tensor forward(const at::Tensor& x) {
//     RandomScope scope(seed, step, microbatch, /*place=*/layer);
//     return at::dropout(x, 0.1, /*train=*/true);  // the same mask in the forward and in its recomputation
//   }
//
// The implementation uses a dispatch key that libtorch reserves for extensions and does not use itself (DeferredInit).
// Each operator with a `generator` argument has a kernel for this key, which fills the argument if the caller passed
// none; a scope enables the key on its thread. All other operators fall through at no cost. Operators without a
// generator argument (dropout, native_dropout, scaled_dot_product_attention, lstm, rand, randn_like, …) call one that
// has it, and so draw from the scope too; a test runs every operator that ATen marks as random. The key precedes
// autocast and autograd, and works in inference mode. Operators on meta tensors draw nothing.
//
// On an accelerator a scope has a generator of that device, with the scope's hash as its seed: the numbers are the same
// on every device of one kind, and not those of the CPU. Kernels that draw from the device's default generator (fused
// dropout and attention) are called while that generator has the scope's seed and offset.
//
// A scope does not apply to:
// - An operator to which the caller passed a generator, even the process's default one. It draws from that generator.
// - Dropout between the layers of an RNN that cuDNN computes, which has a state of its own.
// - Threads to which libtorch has copied this thread's state (at::launch, TorchScript's fork, the autograd threads of
//   other devices). They have the key but no scope, and a random operator there throws until the thread enters a scope.
//   A backward on the CPU runs on the calling thread, and so in the scopes of its caller.
// - Operators with a `generator` argument in libraries that were loaded after this one. They draw as without a scope,
//   except where they call ATen's operators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace penstock {

// Scopes nest: operators draw from the innermost, and the outer one continues its stream when the inner one ends, also
// by an exception. A scope must be destroyed on the thread that created it, in reverse order of creation. Entering a
// scope takes some nanoseconds; the first operator that draws seeds the generator.
//
// The four numbers are hashed one after the other with splitmix64's finalizer, and splitmix64 fills the whole state of
// the Mersenne Twister from the hash (a plain seed would set 32 bits of it). So neighbouring numbers give independent
// streams, numbers that differ in one position only never give the same stream, and streams are the same on every
// machine.
class RandomScope {
  // Offset in the stream of a scope's seed on a device.
  struct DeviceOffset {
    at::Device device;
    std::uint64_t offset;
  };

 public:
  RandomScope(std::uint64_t seed, std::int64_t step, std::int64_t microbatch, std::int64_t place);
  // Enters another place, with the seed, step and microbatch of the innermost scope. Requires is_open().
  explicit RandomScope(std::int64_t place);

  // Place in the stream of random numbers of a scope. A copy is cheap until the scope has drawn on the CPU; then it has
  // the state of the generator, of 5 kB.
  class Position {
    friend class RandomScope;
    std::uint64_t moment_ = 0;
    std::uint64_t hash_ = 0;
    // Undefined if nothing has been drawn yet.
    at::Generator generator_;
    std::vector<DeviceOffset> offsets_;
  };
  // Returns the position of this thread's innermost scope; nothing outside of a scope.
  static std::optional<Position> position();
  // Draws what the scope of the position drew from there on.
  explicit RandomScope(const Position& position);

  ~RandomScope();

  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  // Returns the generator of this thread's innermost scope, for kernels that draw without an ATen operator, or nothing
  // outside of a scope. Valid until that scope ends.
  static std::optional<at::Generator> current(at::Device device = at::kCPU);
  // Returns true if this thread is in a scope.
  static bool is_open();

 private:
  RandomScope(std::uint64_t moment, std::uint64_t place);
  const at::Generator& generator();
  const at::Generator& generator(at::Device device);

  // Hash of seed, step and microbatch; and hash of these and the place.
  std::uint64_t moment_;
  std::uint64_t hash_;
  RandomScope* outer_;
  std::size_t depth_;
  bool seeded_ = false;
  // Generators of accelerators that this scope has seeded.
  std::vector<at::Generator> device_generators_;
  c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace penstock
