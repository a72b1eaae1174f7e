// Tests the guarantees of random scopes, then runs every operator that ATen marks as random with arguments generated
// from its schema. Operators that cannot run here are listed with the reason.
#include "penstock/tensor/random_scope.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "penstock/tensor/intra_op_threads.h"

namespace penstock::internal::testing {
namespace {

// The bytes of tensors, for comparison.
struct Bits {
  std::string bytes;

  friend bool operator==(const Bits&, const Bits&) = default;
  friend void PrintTo(const Bits& bits, std::ostream* out) {
    *out << bits.bytes.size() << " bytes" << std::hex;
    for (const char byte : bits.bytes.substr(0, 32)) {
      *out << ' ' << static_cast<int>(static_cast<unsigned char>(byte));
    }
    *out << std::dec;
  }
};

Bits bits_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().contiguous();
  return {{static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()}};
}

at::Generator& process_generator() {
  static at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  return generator;
}

Bits state_of(const at::Generator& generator) {
  return bits_of(generator.get_state());
}

// Returns 48 numbers in [0.1, 0.9].
at::Tensor some_numbers() {
  return at::linspace(0.1, 0.9, 48).view({6, 8});
}

at::Tensor some_heads() {
  return at::linspace(-1, 1, 160).view({2, 2, 5, 8});
}

// Returns the next number of the caller's scope.
std::uint64_t next_number() {
  return RandomScope::current()->get<at::CPUGeneratorImpl>()->random64();
}

std::uint64_t first_number(std::uint64_t seed, std::int64_t step, std::int64_t microbatch, std::int64_t place) {
  const RandomScope scope(seed, step, microbatch, place);
  return next_number();
}

// Runs `draw` in a scope, and expects bitwise identical results when it is repeated, others at another place, and an
// unchanged default generator.
Bits expect_drawn_from_scope(const std::function<Bits()>& draw) {
  const auto bits_at = [&](std::int64_t place) {
    const RandomScope scope(1, 2, 3, place);
    return draw();
  };
  const Bits before = state_of(process_generator());
  Bits bits = bits_at(4);
  EXPECT_EQ(bits_at(4), bits) << "the same scope drew other numbers";
  EXPECT_NE(bits_at(5), bits) << "another place drew the same numbers";
  EXPECT_EQ(state_of(process_generator()), before) << "the process's generator was drawn from";
  return bits;
}

Bits expect_tensor_drawn_from_scope(const std::function<at::Tensor()>& draw) {
  return expect_drawn_from_scope([&] { return bits_of(draw()); });
}

// Until it is destroyed, a thread draws from the default generator, by operators outside of a scope, and from its own
// scopes.
class NoisyThreads {
 public:
  NoisyThreads()
      : without_scope_([this] {
          while (!stop_) {
            at::rand({64});
            at::dropout(at::ones({8}), 0.5, /*train=*/true);
            std::this_thread::yield();
          }
        }),
        with_scopes_([this] {
          for (std::int64_t step = 0; !stop_; ++step) {
            const RandomScope scope(9, step, 0, 0);
            at::randn({64});
            std::this_thread::yield();
          }
        }) {}
  ~NoisyThreads() {
    stop_ = true;
    without_scope_.join();
    with_scopes_.join();
  }
  NoisyThreads(const NoisyThreads&) = delete;
  NoisyThreads& operator=(const NoisyThreads&) = delete;

 private:
  std::atomic<bool> stop_ = false;
  std::thread without_scope_;
  std::thread with_scopes_;
};

// Runs `body` on a new thread, and joins it.
void on_another_thread(const std::function<void()>& body) {
  std::thread(body).join();
}

// Returns the message of the error that `body` throws, without the backtrace.
std::string message_without_backtrace(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(RandomScope, IsDeterminedByItsFourNumbers) {
  // Computed in Python by an independent splitmix64 and the Mersenne Twister of `random`. A change of these numbers
  // would change the dropout masks of every resumed training run.
  const auto drawn = [](std::uint64_t seed, std::int64_t step, std::int64_t microbatch, std::int64_t place) {
    const RandomScope scope(seed, step, microbatch, place);
    auto* generator = RandomScope::current()->get<at::CPUGeneratorImpl>();
    std::vector<std::uint32_t> numbers(700);
    for (std::uint32_t& number : numbers) {
      number = generator->random();
    }
    return std::vector<std::uint32_t>{numbers[0], numbers[1], numbers[2], numbers[3], numbers[699]};
  };
  using Numbers = std::vector<std::uint32_t>;
  EXPECT_EQ(drawn(0, 0, 0, 0), (Numbers{221198063, 2372613941, 4196296022, 3097648769, 3678559823}));
  EXPECT_EQ(drawn(1, 2, 3, 4), (Numbers{3371187202, 2280914523, 286711248, 2360905197, 3577898254}));
  EXPECT_EQ(drawn(~std::uint64_t{0}, -1, 0, std::int64_t{1} << 40),
            (Numbers{472745449, 1314300795, 2919941101, 1890863579, 4030478741}));
}

TEST(RandomScope, GivesNeighbouringNumbersUnrelatedStreams) {
  std::set<std::uint64_t> firsts;
  std::uint64_t last = 0;
  double bits_changed = 0;
  constexpr int kEach = 9;
  for (int seed = 0; seed < kEach; ++seed) {
    for (int step = 0; step < kEach; ++step) {
      for (int microbatch = 0; microbatch < kEach; ++microbatch) {
        for (int place = 0; place < kEach; ++place) {
          const std::uint64_t first = first_number(static_cast<std::uint64_t>(seed), step, microbatch, place);
          firsts.insert(first);
          bits_changed += std::popcount(first ^ last);
          last = first;
        }
      }
    }
  }
  EXPECT_EQ(firsts.size(), kEach * kEach * kEach * kEach);
  // The mean of 6,561 draws of 64 coins each is within a quarter of a bit of 32 (5 standard deviations).
  EXPECT_NEAR(bits_changed / static_cast<double>(firsts.size()), 32, 0.25);
}

TEST(RandomScope, DoesNotDependOnWhatWasDrawnBefore) {
  const auto draw = [] { return at::randn({3}, at::kDouble); };
  const Bits bits = expect_tensor_drawn_from_scope(draw);
  {
    const RandomScope other(5, 5, 5, 5);
    // An odd number of normal numbers leaves one cached in the generator, which the next scope reuses.
    at::empty({1}, at::kFloat).normal_();
    at::empty({1}, at::kDouble).normal_();
  }
  EXPECT_EQ(expect_tensor_drawn_from_scope(draw), bits);
}

TEST(RandomScope, ContinuesItsStreamAfterAnInnerOne) {
  std::vector<std::uint64_t> alone;
  {
    const RandomScope scope(1, 2, 3, 4);
    alone = {next_number(), next_number()};
  }
  const RandomScope outer(1, 2, 3, 4);
  EXPECT_EQ(next_number(), alone[0]);
  {
    const RandomScope inner(1, 2, 3, 5);
    EXPECT_NE(next_number(), alone[1]);
    const RandomScope same_as_outer(1, 2, 3, 4);
    EXPECT_EQ(next_number(), alone[0]);
    EXPECT_EQ(next_number(), alone[1]);
  }
  EXPECT_EQ(next_number(), alone[1]);
}

TEST(RandomScope, EndsWithAnException) {
  const RandomScope outer(1, 2, 3, 4);
  const at::Generator outers = *RandomScope::current();
  EXPECT_THROW(
      {
        const RandomScope inner(1, 2, 3, 5);
        at::rand({2});
        throw std::runtime_error("from within");
      },
      std::runtime_error);
  EXPECT_EQ(*RandomScope::current(), outers);
  EXPECT_THROW(
      {
        const RandomScope inner(1, 2, 3, 5);
        at::dropout(some_numbers(), /*p=*/2, /*train=*/true);
      },
      c10::Error);
  EXPECT_EQ(*RandomScope::current(), outers);
}

TEST(RandomScope, HasNoEffectAfterItEnds) {
  EXPECT_FALSE(RandomScope::current());
  {
    const RandomScope scope(1, 2, 3, 4);
    EXPECT_TRUE(RandomScope::current());
  }
  EXPECT_FALSE(RandomScope::current());
  const Bits before = state_of(process_generator());
  at::rand({2});
  EXPECT_NE(state_of(process_generator()), before);
}

TEST(RandomScope, NeedsNoOperator) {
  const Bits before = state_of(process_generator());
  on_another_thread([] {
    const RandomScope scope(1, 2, 3, 4);
    const RandomScope inner(1, 2, 3, 5);
  });
  EXPECT_EQ(state_of(process_generator()), before);
}

TEST(RandomScope, LeavesOtherThreadsAlone) {
  const RandomScope scope(1, 2, 3, 4);
  const at::Generator mine = *RandomScope::current();
  const Bits before = state_of(mine);
  on_another_thread([] {
    EXPECT_FALSE(RandomScope::current());
    process_generator().set_current_seed(7);
    const at::Tensor theirs = at::rand({8});
    process_generator().set_current_seed(7);
    EXPECT_EQ(bits_of(at::rand({8}, process_generator())), bits_of(theirs));
  });
  EXPECT_EQ(state_of(mine), before);
}

TEST(RandomScope, GivesEveryThreadTheSameNumbers) {
  const std::uint64_t here = first_number(1, 2, 3, 4);
  on_another_thread([&] { EXPECT_EQ(first_number(1, 2, 3, 4), here); });
}

TEST(RandomScope, LeavesAGeneratorThatACallerHolds) {
  at::Generator kept;
  {
    const RandomScope scope(1, 2, 3, 4);
    kept = *RandomScope::current();
  }
  const Bits before = state_of(kept);
  const std::uint64_t first = first_number(5, 5, 5, 5);
  EXPECT_EQ(state_of(kept), before);
  kept = at::Generator();
  EXPECT_EQ(first_number(5, 5, 5, 5), first);
}

TEST(RandomScope, MatchesAKnownDropoutMask) {
  const RandomScope scope(1, 2, 3, 4);
  const at::Tensor x = some_numbers();
  const at::Generator same = RandomScope::current()->clone();
  const at::Tensor mask = at::empty_like(x).bernoulli_(0.75, same).div_(0.75);
  EXPECT_EQ(bits_of(at::dropout(x, 0.25, /*train=*/true)), bits_of(x * mask));
}

TEST(RandomScope, AppliesToKernelsWithSeveralThreads) {
  const IntraOpThreads two(2);
  expect_tensor_drawn_from_scope([] { return at::dropout(at::ones({1 << 18}), 0.5, /*train=*/true); });
  expect_tensor_drawn_from_scope([] { return at::randn({1 << 18}); });
}

TEST(RandomScope, TakesAGeneratorWithoutImplementationForNone) {
  expect_tensor_drawn_from_scope([] { return some_numbers().bernoulli_(0.5, at::Generator()); });
}

TEST(RandomScope, AppliesToForwardAndBackward) {
  at::Tensor x = some_numbers().requires_grad_();
  expect_tensor_drawn_from_scope([&] {
    x.mutable_grad() = at::Tensor();
    const at::Tensor y = at::dropout(x, 0.5, /*train=*/true);
    y.sum().backward();
    EXPECT_TRUE(at::equal(y, x * x.grad()));
    return x.grad();
  });
}

// Dropout that saves only its input and draws its mask again in the backward.
class RecomputedDropout : public torch::autograd::Function<RecomputedDropout> {
 public:
  static at::Tensor run(const at::Tensor& x) {
    const RandomScope scope(1, 2, 3, 4);
    return at::dropout(x * x, 0.5, /*train=*/true);
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return run(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode with_gradients(true);
    run(x).backward(gradients[0]);
    return {x.grad()};
  }
};

TEST(RandomScope, GivesARecomputationTheMaskOfTheForward) {
  const NoisyThreads noise;
  at::Tensor x = some_numbers().requires_grad_();
  at::Tensor kept = some_numbers().requires_grad_();
  for (int place = 0; place < 20; ++place) {
    // Other scopes around the forward and around the backward.
    at::Tensor y;
    {
      const RandomScope around(8, 8, 8, place);
      y = RecomputedDropout::apply(x);
    }
    const RandomScope around(9, 9, 9, place);
    y.sum().backward();
    RecomputedDropout::run(kept).sum().backward();
    EXPECT_EQ(bits_of(x.grad()), bits_of(kept.grad()));
  }
}

TEST(RandomScope, AppliesToAttention) {
  at::Tensor query = some_heads().requires_grad_();
  for (const bool causal : {false, true}) {
    expect_tensor_drawn_from_scope([&] {
      query.mutable_grad() = at::Tensor();
      const at::Tensor out =
          at::scaled_dot_product_attention(query, some_heads(), some_heads(), {}, /*dropout_p=*/0.5, causal);
      out.sum().backward();
      return at::cat({out, query.grad()});
    });
  }
}

// Runs a model with a random operator of each kind, and returns the dtypes under autocast.
at::Tensor small_model(const at::Tensor& x) {
  const at::Tensor hidden = at::dropout(at::linear(x, some_numbers().t().mm(some_numbers())), 0.25, /*train=*/true);
  const at::Tensor heads = hidden.view({1, 2, 3, 8});
  return at::scaled_dot_product_attention(heads, heads, heads, {}, /*dropout_p=*/0.25).sum(-1).to(at::kFloat);
}

// Enables autocast to bfloat16 in a scope.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

TEST(RandomScope, AppliesUnderAutocast) {
  const auto draw = [] { return small_model(some_numbers()); };
  const Bits plain = expect_tensor_drawn_from_scope(draw);
  const Autocast autocast;
  EXPECT_NE(expect_tensor_drawn_from_scope(draw), plain) << "autocast changed nothing, so this has tested nothing";
  expect_tensor_drawn_from_scope([] {
    at::Tensor x = some_numbers().requires_grad_();
    small_model(x).sum().backward();
    return x.grad();
  });
}

TEST(RandomScope, DrawsTheSameWithoutGradientsAndInInferenceMode) {
  const auto draw = [] { return small_model(some_numbers()); };
  const Bits with_gradients =
      expect_tensor_drawn_from_scope([] { return small_model(some_numbers().requires_grad_()); });
  {
    const at::NoGradGuard no_gradients;
    EXPECT_EQ(expect_tensor_drawn_from_scope(draw), with_gradients);
  }
  const RandomScope around(9, 9, 9, 9);
  const c10::InferenceMode inference;
  EXPECT_EQ(expect_tensor_drawn_from_scope(draw), with_gradients);
}

TEST(RandomScope, ChangesNothingOutside) {
  // Computed by torch 2.13 in Python, which has no scopes.
  process_generator().set_current_seed(7);
  EXPECT_TRUE(at::equal(at::rand({3}), at::tensor({0.5349225401878357F, 0.19880318641662598F, 0.6592116951942444F})));
  EXPECT_TRUE(at::equal(at::randn({2}), at::tensor({-0.032551974058151245F, 1.0110543966293335F})));
  {
    const RandomScope scope(1, 2, 3, 4);
    at::rand({3});
  }
  EXPECT_TRUE(at::equal(at::dropout(at::ones(16), 0.5, /*train=*/true),
                        at::tensor({2, 0, 2, 0, 0, 0, 0, 2, 0, 0, 2, 0, 2, 0, 0, 0}, at::kFloat)));
  EXPECT_TRUE(at::equal(at::randperm(6), at::tensor({2, 5, 3, 0, 4, 1}, at::kLong)));
}

TEST(RandomScope, AllowsMetaTensors) {
  const RandomScope scope(1, 2, 3, 4);
  const Bits before = state_of(*RandomScope::current());
  const at::Tensor x = at::randn({2, 3}, at::device(at::kMeta));
  EXPECT_EQ(at::dropout(x, 0.5, /*train=*/true).sizes(), x.sizes());
  EXPECT_EQ(x.clone().bernoulli_(0.5).sizes(), x.sizes());
  EXPECT_EQ(state_of(*RandomScope::current()), before);
}

TEST(RandomScope, AsksOtherDevicesForAGenerator) {
  // There is no such device, only a tensor that claims to be on it: operators must throw before they reach a kernel.
  const at::Tensor elsewhere =
      at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                               caffe2::TypeMeta::Make<float>(), c10::Device(c10::kPrivateUse1, 0));
  const RandomScope scope(1, 2, 3, 4);
  // Nobody has registered the functions of the device, its generators among them.
  const auto is_refused = [](const std::function<void()>& body) {
    return message_without_backtrace(body).find("PrivateUse1HooksInterface") != std::string::npos;
  };
  EXPECT_TRUE(is_refused([&] { at::bernoulli(elsewhere); }));
  const auto flash = [&](double dropout) {
    at::_scaled_dot_product_flash_attention(elsewhere, elsewhere, elsewhere, dropout);
  };
  EXPECT_TRUE(is_refused([&] { at::native_dropout(elsewhere, 0.5, /*train=*/true); }));
  EXPECT_TRUE(is_refused([&] { flash(0.5); }));
  EXPECT_FALSE(is_refused([&] { flash(0); })) << "it draws nothing, and fails for want of a kernel only";
}

TEST(RandomScope, RefusesAThreadThatOnlyInheritedItsState) {
  const RandomScope scope(1, 2, 3, 4);
  const at::ThreadLocalState state;
  on_another_thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    EXPECT_FALSE(RandomScope::current());
    EXPECT_EQ(message_without_backtrace([] { at::dropout(at::ones({2}), 0.5, /*train=*/true); }),
              "aten::bernoulli_.float on a thread that inherited its state from a thread in a RandomScope, but has no "
              "scope of "
              "its own: its random numbers would depend on the order of execution.\n"
              "  Hint: enter a RandomScope on this thread, with a place of its own.");
    EXPECT_NE(first_number(1, 2, 3, 5), 0U);
    expect_tensor_drawn_from_scope([] { return at::rand({8}); });
  });
}

TEST(RandomScope, DoesNotApplyToAStateCapturedOutsideOfIt) {
  // As in a nested backward, when the thread continues with a node of the outer backward.
  const at::ThreadLocalState outside;
  const RandomScope scope(1, 2, 3, 4);
  const Bits before = state_of(process_generator());
  {
    const at::ThreadLocalStateGuard guard(outside);
    EXPECT_FALSE(RandomScope::current());
    at::rand({2});
  }
  EXPECT_NE(state_of(process_generator()), before);
  EXPECT_TRUE(RandomScope::current());
}

// The tests below run each random operator of the dispatcher.

const char* const kNoCpuKernel = "has no kernel for the CPU, or calls one that has none";

const std::map<std::string, std::string>& not_run() {
  static const std::map<std::string, std::string> kReasons = {
      {"aten::_cudnn_attention_backward", kNoCpuKernel},
      {"aten::_cudnn_attention_forward", kNoCpuKernel},
      {"aten::_cudnn_init_dropout_state", kNoCpuKernel},
      {"aten::_cudnn_init_dropout_state.out", kNoCpuKernel},
      {"aten::_cudnn_rnn", kNoCpuKernel},
      {"aten::_cudnn_rnn.out", kNoCpuKernel},
      {"aten::_efficient_attention_forward", kNoCpuKernel},
      {"aten::_fill_mem_eff_dropout_mask_", kNoCpuKernel},
      {"aten::_flash_attention_forward", kNoCpuKernel},
      {"aten::_flash_attention_forward.quantized", kNoCpuKernel},
      {"aten::_flash_attention_forward_no_dropout_inplace", kNoCpuKernel},
      {"aten::_fused_dropout", kNoCpuKernel},
      {"aten::_fused_dropout.out", kNoCpuKernel},
      {"aten::_lstm_mps", kNoCpuKernel},
      {"aten::_lstm_mps.out", kNoCpuKernel},
      {"aten::_nested_tensor_softmax_with_shape", kNoCpuKernel},
      {"aten::_scaled_dot_product_attention_math_for_mps", kNoCpuKernel},
      {"aten::_scaled_dot_product_cudnn_attention", kNoCpuKernel},
      {"aten::_scaled_dot_product_cudnn_attention_backward", kNoCpuKernel},
      {"aten::_scaled_dot_product_efficient_attention", kNoCpuKernel},
      {"aten::_scaled_dot_product_efficient_attention_backward", kNoCpuKernel},
      {"aten::_scaled_dot_product_flash_attention", kNoCpuKernel},
      {"aten::_scaled_dot_product_flash_attention.quantized", kNoCpuKernel},
      {"aten::_triton_scaled_dot_attention", kNoCpuKernel},
      {"aten::_triton_scaled_dot_attention.out", kNoCpuKernel},
      {"aten::miopen_rnn", kNoCpuKernel},
      {"aten::miopen_rnn.out", kNoCpuKernel},
      {"inductor_prims::inductor_reserve_rng_state", kNoCpuKernel},
      {"aten::_fused_sdp_choice", "draws nothing, for all its tag"},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", "refuses dropout"},
      {"aten::_scaled_dot_product_fused_attention_overrideable", "is for other libraries to override, and throws"},
  };
  return kReasons;
}

struct Call {
  std::string name;
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
};

bool is_recurrent(const std::string& name) {
  return name.starts_with("aten::lstm") || name.starts_with("aten::gru") || name.starts_with("aten::rnn_");
}

// Two layers with hidden vectors of 4 numbers, over 3 steps of 2 sequences.
c10::IValue argument_of_recurrent(const std::string& name, const c10::Argument& argument) {
  const bool is_lstm = name.starts_with("aten::lstm");
  const std::int64_t rows = is_lstm ? 16 : name.starts_with("aten::gru") ? 12 : 4;
  const at::Tensor state = at::linspace(-1, 1, 16).view({2, 2, 4});
  const at::Tensor weight = at::linspace(-1, 1, rows * 4).view({rows, 4});
  const at::Tensor bias = at::linspace(-1, 1, rows);
  const std::map<std::string, c10::IValue> values = {
      {"input", at::linspace(-1, 1, 24).view({3, 2, 4})},
      {"data", at::linspace(-1, 1, 24).view({6, 4})},
      {"batch_sizes", at::tensor({2, 2, 2}, at::kLong)},
      {"hx", is_lstm ? c10::IValue(c10::List<at::Tensor>({state, state})) : c10::IValue(state)},
      {"params", c10::List<at::Tensor>({weight, weight, bias, bias, weight, weight, bias, bias})},
      {"has_biases", true},
      {"num_layers", 2},
      {"dropout", 0.5},
      {"train", true},
      {"bidirectional", false},
      {"batch_first", false},
  };
  return values.at(argument.name());
}

c10::IValue out_argument(const std::string& name, const c10::Argument& argument) {
  const bool is_mask = name == "aten::native_dropout.out" && argument.name() == "out1";
  const bool is_index = name == "aten::multinomial.out";
  return at::zeros({6, 8}, is_mask ? at::kBool : is_index ? at::kLong : at::kFloat);
}

// Returns a valid value for an argument, chosen by its name and type.
c10::IValue argument_for(const std::string& name, const c10::Argument& argument) {
  if (is_recurrent(name)) {
    return argument_of_recurrent(name, argument);
  }
  if (argument.is_out()) {
    return out_argument(name, argument);
  }
  const std::set<std::string> heads = {"query", "key", "value"};
  if (heads.contains(argument.name())) {
    return some_heads();
  }
  const bool is_tensor = argument.type()->kind() == c10::TypeKind::TensorType;
  if (is_tensor && argument.name() == "high") {
    return at::scalar_tensor(1000, at::kLong);
  }
  if (is_tensor && name.starts_with("aten::rrelu")) {
    return -some_numbers();
  }
  if (is_tensor) {
    return argument.name() == "count" ? at::full({6, 8}, 100.) : some_numbers();
  }
  static const std::map<std::string, c10::IValue> kValues = {
      {"p", 0.5},
      {"dropout_p", 0.5},
      {"train", true},
      {"training", true},
      {"size", std::vector<std::int64_t>{6, 8}},
      {"n", 31},
      {"low", 3},
      {"high", 1000},
      {"from", 3},
      {"to", 1000},
      {"mean", 0.5},
      {"std", 2.0},
      {"num_samples", 5},
  };
  const bool is_float = argument.type()->kind() == c10::TypeKind::FloatType;
  if (const auto value = kValues.find(argument.name()); value != kValues.end()) {
    return is_float ? c10::IValue(value->second.toScalar().toDouble()) : value->second;
  }
  return argument.default_value().value_or(c10::IValue());
}

bool is_random(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  const auto is_generator = [](const c10::Argument& argument) { return argument.name() == "generator"; };
  return op.hasTag(at::Tag::nondeterministic_seeded) || std::any_of(arguments.begin(), arguments.end(), is_generator);
}

std::map<std::string, c10::OperatorHandle> random_operators() {
  std::map<std::string, c10::OperatorHandle> found;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && is_random(*op)) {
      found.emplace(c10::toString(name), *op);
    }
  }
  return found;
}

const std::vector<Call>& random_calls() {
  static const std::vector<Call> kCalls = [] {
    std::vector<Call> made;
    for (const auto& [name, op] : random_operators()) {
      if (not_run().contains(name)) {
        continue;
      }
      Call& call = made.emplace_back(Call{name, op, {}});
      for (const c10::Argument& argument : op.schema().arguments()) {
        call.arguments.push_back(argument_for(name, argument));
      }
    }
    return made;
  }();
  return kCalls;
}

// Calls the operator on copies of its tensors, as it may write to them, and returns the bytes of its outputs.
Bits run(const Call& call, const at::Generator& generator = {}) {
  std::vector<c10::IValue> stack;
  for (std::size_t index = 0; index < call.arguments.size(); ++index) {
    const c10::IValue& argument = call.arguments[index];
    if (generator.defined() && call.op.schema().arguments()[index].name() == "generator") {
      stack.emplace_back(generator);
    } else {
      stack.push_back(argument.isTensor() ? c10::IValue(argument.toTensor().clone()) : argument);
    }
  }
  call.op.callBoxed(stack);
  Bits bits;
  for (const c10::IValue& output : stack) {
    bits.bytes += bits_of(output.toTensor()).bytes;
  }
  return bits;
}

Bits run_at(const Call& call, std::int64_t place) {
  const RandomScope scope(1, 2, 3, place);
  return run(call);
}

bool takes_generator(const Call& call) {
  return call.op.schema().argumentIndexWithName("generator").has_value();
}

TEST(EveryRandomOperator, IsRunOrListedWithTheReason) {
  const auto found = random_operators();
  for (const auto& [name, reason] : not_run()) {
    EXPECT_TRUE(found.contains(name)) << name << " is listed as not run, but there is no such random operator";
  }
  std::cout << "random operators: " << found.size() << ", run here: " << random_calls().size()
            << ", listed with a reason: " << not_run().size() << "\n";
  EXPECT_EQ(random_calls().size() + not_run().size(), found.size());
  EXPECT_GE(random_calls().size(), 110U);
}

TEST(EveryRandomOperator, WithoutAKernelForTheCpuHasNone) {
  for (const auto& [name, reason] : not_run()) {
    if (reason == kNoCpuKernel) {
      // An operator with `out` calls the one without it.
      const std::string functional = name.ends_with(".out") ? name.substr(0, name.size() - 4) : name;
      EXPECT_FALSE(random_operators().at(functional).hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) << name;
    }
  }
}

TEST(EveryRandomOperator, ThatIsListedForOtherReasonsDrawsNothing) {
  const at::Tensor heads = some_heads();
  const Bits before = state_of(process_generator());
  at::_fused_sdp_choice(heads, heads, heads, {}, /*dropout_p=*/0.5);
  EXPECT_THROW(at::_scaled_dot_product_flash_attention_for_cpu(heads, heads, heads, /*dropout_p=*/0.5), c10::Error);
  EXPECT_THROW(at::_scaled_dot_product_fused_attention_overrideable(heads, heads, heads, {}, /*dropout_p=*/0.5),
               c10::Error);
  EXPECT_EQ(state_of(process_generator()), before);
}

TEST(EveryRandomOperator, DrawsFromTheScope) {
  for (const Call& call : random_calls()) {
    SCOPED_TRACE(call.name);
    expect_drawn_from_scope([&] { return run(call); });
  }
}

TEST(EveryRandomOperator, DrawsFromTheScopeWithoutGradientsAndInInferenceMode) {
  for (const Call& call : random_calls()) {
    SCOPED_TRACE(call.name);
    const at::NoGradGuard no_gradients;
    expect_drawn_from_scope([&] { return run(call); });
    const c10::InferenceMode inference;
    expect_drawn_from_scope([&] { return run(call); });
  }
}

TEST(EveryRandomOperator, DrawsFromTheScopeUnderAutocast) {
  const Autocast autocast;
  // oneDNN's LSTM in bfloat16 ends the process with SIGILL on machines that report AMX and do not support it.
  at::globalContext().setUserEnabledMkldnn(false);
  for (const Call& call : random_calls()) {
    SCOPED_TRACE(call.name);
    expect_drawn_from_scope([&] { return run(call); });
  }
  at::globalContext().setUserEnabledMkldnn(true);
}

TEST(EveryRandomOperator, DrawsFromTheDefaultGeneratorOutside) {
  for (const Call& call : random_calls()) {
    SCOPED_TRACE(call.name);
    process_generator().set_current_seed(7);
    const Bits before = state_of(process_generator());
    const Bits bits = run(call);
    EXPECT_NE(state_of(process_generator()), before) << "it draws nothing, so running it in scopes tests nothing";
    if (takes_generator(call)) {
      EXPECT_EQ(run(call, at::detail::createCPUGenerator(7)), bits);
    }
    process_generator().set_current_seed(7);
    run_at(call, 4);
    EXPECT_EQ(run(call), bits) << "a scope that has ended changed what is drawn";
  }
}

TEST(EveryRandomOperator, IsBitwiseIdenticalAThousandTimesWhileOtherThreadsDraw) {
  // Use one intra-op thread: those of this thread and of the noise would wait for each other.
  const IntraOpThreads one(1);
  const NoisyThreads noise;
  for (const Call& call : random_calls()) {
    const Bits bits = run_at(call, 4);
    int others = 0;
    for (int repetition = 0; repetition < 1000; ++repetition) {
      others += run_at(call, 4) == bits ? 0 : 1;
    }
    EXPECT_EQ(others, 0) << call.name << ": times of 1000 that the bits were others";
  }
}

TEST(EveryRandomOperator, DrawsFromAnExplicitGenerator) {
  for (const Call& call : random_calls()) {
    if (takes_generator(call)) {
      const Bits outside = run(call, at::detail::createCPUGenerator(7));
      const RandomScope scope(1, 2, 3, 4);
      const Bits before = state_of(*RandomScope::current());
      EXPECT_EQ(run(call, at::detail::createCPUGenerator(7)), outside) << call.name;
      EXPECT_EQ(state_of(*RandomScope::current()), before) << call.name;
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
