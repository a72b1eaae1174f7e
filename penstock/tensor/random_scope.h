// Random numbers that belong to a place in the computation, and not to whoever drew before. libtorch has one CPU
// generator a process, and dropout, attention and LSTM take no other; on ranks that are threads, what they draw would
// depend on who comes first. While a RandomScope lives on a thread, every random operator called on that thread draws
// from the scope's own generator instead, which starts from four numbers: entered again, it gives the same numbers
// again.
//
//   at::Tensor forward(const at::Tensor& x) {
//     RandomScope scope(seed, step, microbatch, /*place=*/layer);
//     return at::dropout(x, 0.1, /*train=*/true);  // the same mask in the forward and in its recomputation
//   }
//
// It works by a dispatch key that libtorch keeps for others and does not use itself (DeferredInit). On it, each
// operator with a `generator` argument has a kernel which fills that argument when the caller gave none; a scope
// switches the key on for its thread. All other operators fall through it, at no cost. Operators that take no generator
// (dropout, native_dropout, scaled_dot_product_attention, lstm, rand, randn_like, …) call one that does, and so draw
// from the scope too; a test runs every operator that ATen marks as random. The key stands above autocast and autograd,
// and works in inference mode.
//
// What a scope does not reach:
// - An operator to which the caller gave a generator, be it the process's own: it draws from that one.
// - Other devices than the CPU. An operator that would draw on one is refused in a scope, rather than left to draw from
//   that device's own generator. Meta tensors draw nothing, and pass.
// - Threads to which libtorch handed this thread's state (at::launch, TorchScript's fork, the autograd threads of other
//   devices): they have the key but no scope, and a random operator there is refused until they enter one. A backward
//   on the CPU runs on the calling thread, in the scopes of its caller and its own.
// - Operators of libraries that were loaded after this one: those with a `generator` argument of their own draw from
//   where they would without a scope. What they draw through ATen's operators is covered.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace penstock {

// Scopes nest: the innermost is drawn from, and the one around it goes on where it was when the inner one ends, by
// exception too. A scope ends on the thread on which it began, and before those around it. Entering one takes some
// nanoseconds; its generator is made ready by the first operator that draws.
//
// The numbers that start the generator are hashed together by splitmix64's finalizer, one after the other, and
// splitmix64 fills all of the Mersenne Twister's state from the hash (a plain seed would reach 32 bits of it). So
// neighbouring numbers give unrelated streams, numbers that differ in one place only never give the same one, and the
// streams are the same on every machine.
class RandomScope {
 public:
  RandomScope(std::uint64_t seed, std::int64_t step, std::int64_t microbatch, std::int64_t place);
  // At another place, with the seed, step and microbatch of the innermost scope, which there must be: is_open().
  explicit RandomScope(std::int64_t place);
  ~RandomScope();

  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  // The generator of this thread's innermost scope, for kernels of our own that draw by themselves; none outside of
  // one. Good until that scope ends.
  static std::optional<at::Generator> current();
  // Whether this thread is in one.
  static bool is_open();

 private:
  RandomScope(std::uint64_t moment, std::uint64_t place);
  const at::Generator& generator();

  // Of seed, step and microbatch; and of these and the place.
  std::uint64_t moment_;
  std::uint64_t hash_;
  RandomScope* outer_;
  std::size_t depth_;
  bool seeded_ = false;
  c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace penstock
