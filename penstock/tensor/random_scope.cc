#include "penstock/tensor/random_scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/device/generators.h"

namespace penstock {
namespace {

constexpr c10::DispatchKey kScopeKey = c10::DispatchKey::DeferredInit;
constexpr const char* kOwner = "penstock::RandomScope";
constexpr c10::DispatchKeySet kBelowScopeKey(c10::DispatchKeySet::FULL_AFTER, kScopeKey);

constinit thread_local RandomScope* innermost = nullptr;
// One generator for each depth of nesting on this thread, reused by successive scopes.
thread_local std::vector<at::Generator> generators;

constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

// The finalizer of splitmix64.
constexpr std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

constexpr std::uint64_t hash_with(std::uint64_t hash, std::uint64_t number) {
  return mixed((hash ^ number) + kGoldenGamma);
}

void seed_generator(at::CPUGeneratorImpl& generator, std::uint64_t hash) {
  // left_ = 1: the first draw computes the next state.
  at::mt19937_data_pod data{.seed_ = hash, .left_ = 1, .seeded_ = true, .next_ = 0, .state_ = {}};
  std::uint64_t counter = hash;
  for (std::size_t word = 0; word < data.state_.size(); word += 2) {
    counter += kGoldenGamma;
    const std::uint64_t bits = mixed(counter);
    data.state_[word] = static_cast<std::uint32_t>(bits);
    data.state_[word + 1] = static_cast<std::uint32_t>(bits >> 32);
  }
  at::mt19937 engine = generator.engine();
  engine.set_data(data);
  generator.set_engine(engine);
  // Normal numbers are generated in pairs, and the generator caches the second.
  generator.set_next_float_normal_sample(std::nullopt);
  generator.set_next_double_normal_sample(std::nullopt);
}

// Returns the device of the first tensor among the arguments that is not on the CPU; the CPU if there is none.
at::Device device_among(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      const at::Tensor& tensor = argument.toTensor();
      if (tensor.defined() && !tensor.is_cpu()) return tensor.device();
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        if (tensor.defined() && !tensor.is_cpu()) return tensor.device();
      }
    }
  }
  return at::kCPU;
}

// Returns the device on which a call draws: that of its tensors. Returns nothing for a factory function, which has no
// tensor yet and draws by calling another operator, and for meta tensors, which draw nothing.
std::optional<at::Device> drawing_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                         const torch::jit::Stack& stack) {
  const c10::BackendComponent backend = keys.highestBackendKey();
  if (backend == c10::BackendComponent::InvalidBit || backend == c10::BackendComponent::MetaBit) return std::nullopt;
  if (backend == c10::BackendComponent::CPUBit) return at::kCPU;
  return device_among(torch::jit::last(stack, op.schema().arguments().size()));
}

at::Generator generator_of_scope(const c10::OperatorHandle& op, at::Device device) {
  std::optional<at::Generator> generator = RandomScope::current(device);
  TORCH_CHECK(generator, op.operator_name(),
              " on a thread that inherited its state from a thread in a RandomScope, but ",
              "has no scope of its own: its random numbers would depend on the order of execution.\n",
              "  Hint: enter a RandomScope on this thread, with a place of its own.");
  return *std::move(generator);
}

// Fills the `generator` argument if the caller passed none.
class DrawFromScope final : public c10::OperatorKernel {
 public:
  explicit DrawFromScope(std::ptrdiff_t from_end) : from_end_(from_end) {}

  // NOLINTNEXTLINE(readability-make-member-function-const): the dispatcher asks for this signature.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    c10::IValue& generator = stack->end()[-from_end_];
    // None, or a generator without an implementation, which operators treat as none.
    if (!generator.isPtrType()) {
      if (const auto device = drawing_device(op, keys, *stack)) generator = generator_of_scope(op, *device);
    }
    op.redispatchBoxed(keys & kBelowScopeKey, stack);
  }

 private:
  std::ptrdiff_t from_end_;
};

// Calls kernels of accelerators that take no generator while their device's default generator is that of the scope. A
// dropout of probability 0 draws nothing.
class DrawFromDefault final : public c10::OperatorKernel {
 public:
  explicit DrawFromDefault(std::optional<std::ptrdiff_t> probability_from_end)
      : probability_from_end_(probability_from_end) {}

  // NOLINTNEXTLINE(readability-make-member-function-const): the dispatcher asks for this signature.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const bool draws = !probability_from_end_ || stack->end()[-*probability_from_end_].toDouble() > 0;
    const auto device = draws ? drawing_device(op, keys, *stack) : std::nullopt;
    if (!device || device->is_cpu()) {
      op.redispatchBoxed(keys & kBelowScopeKey, stack);
      return;
    }
    at::Generator generator = generator_of_scope(op, *device);
    const internal::DefaultGeneratorScope scope(*device, generator);
    op.redispatchBoxed(keys & kBelowScopeKey, stack);
  }

 private:
  std::optional<std::ptrdiff_t> probability_from_end_;
};

// Returns the position of the argument that `is_match` accepts, counted from the end of the stack.
template <class Predicate>
std::optional<std::ptrdiff_t> find_argument(const c10::FunctionSchema& schema, Predicate&& is_match) {
  const std::vector<c10::Argument>& arguments = schema.arguments();
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    if (is_match(arguments[index])) {
      return static_cast<std::ptrdiff_t>(arguments.size() - index);
    }
  }
  return std::nullopt;
}

bool is_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool is_dropout_probability(const c10::Argument& argument) {
  const std::string& name = argument.name();
  return argument.type()->kind() == c10::TypeKind::FloatType &&
         (name == "p" || name == "dropout" || name == "dropout_p");
}

// Registers the kernels of the scope's dispatch key while this library is loaded. This happens at load time and not in
// the first scope, as the dispatcher's tables must not change while other threads call operators.
class Kernels {
 public:
  Kernels() {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    registrations_.push_back(dispatcher.registerFallback(kScopeKey, c10::KernelFunction::makeFallthrough(), kOwner));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (const auto op = dispatcher.findSchema(name)) {
        add_kernel_of(*op);
      }
    }
  }

 private:
  void add_kernel_of(const c10::OperatorHandle& op) {
    if (const auto generator = find_argument(op.schema(), is_generator)) {
      add(op, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<DrawFromScope>(*generator)));
    } else if (op.hasTag(at::Tag::nondeterministic_seeded) && draws_by_itself(op)) {
      const auto probability = find_argument(op.schema(), is_dropout_probability);
      add(op, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<DrawFromDefault>(probability)));
    }
  }

  // Returns true for operators whose kernels draw without calling an operator with a generator: those without a CPU
  // kernel, and native_dropout on other devices.
  static bool draws_by_itself(const c10::OperatorHandle& op) {
    return !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) ||
           op.operator_name() == c10::OperatorName("aten::native_dropout", "");
  }

  void add(const c10::OperatorHandle& op, c10::KernelFunction kernel) {
    registrations_.push_back(c10::Dispatcher::singleton().registerImpl(op.operator_name(), kScopeKey, std::move(kernel),
                                                                       std::nullopt, nullptr, kOwner));
  }

  std::vector<c10::RegistrationHandleRAII> registrations_;
};

const Kernels kKernels;

}  // namespace

RandomScope::RandomScope(std::uint64_t seed, std::int64_t step, std::int64_t microbatch, std::int64_t place)
    : RandomScope(hash_with(hash_with(hash_with(0, seed), static_cast<std::uint64_t>(step)),
                            static_cast<std::uint64_t>(microbatch)),
                  static_cast<std::uint64_t>(place)) {}

RandomScope::RandomScope(std::int64_t place) : RandomScope(innermost->moment_, static_cast<std::uint64_t>(place)) {}

RandomScope::RandomScope(std::uint64_t moment, std::uint64_t place)
    : moment_(moment),
      hash_(hash_with(moment, place)),
      outer_(innermost),
      depth_(outer_ == nullptr ? 0 : outer_->depth_ + 1),
      key_(kScopeKey) {
  innermost = this;
}

std::optional<RandomScope::Position> RandomScope::position() {
  if (innermost == nullptr) return std::nullopt;
  Position position;
  position.moment_ = innermost->moment_;
  position.hash_ = innermost->hash_;
  if (innermost->seeded_) position.generator_ = generators[innermost->depth_].clone();
  for (const at::Generator& generator : innermost->device_generators_) {
    position.offsets_.push_back({generator.device(), generator.get_offset()});
  }
  return position;
}

RandomScope::RandomScope(const Position& position)
    : moment_(position.moment_),
      hash_(position.hash_),
      outer_(innermost),
      depth_(outer_ == nullptr ? 0 : outer_->depth_ + 1),
      seeded_(position.generator_.defined()),
      key_(kScopeKey) {
  if (seeded_) {
    if (generators.size() <= depth_) generators.resize(depth_ + 1);
    generators[depth_] = position.generator_.clone();
  }
  for (const DeviceOffset& drawn : position.offsets_) {
    device_generators_.push_back(internal::make_generator(drawn.device, hash_));
    device_generators_.back().set_offset(drawn.offset);
  }
  innermost = this;
}

RandomScope::~RandomScope() {
  assert(innermost == this && "random scopes end in the opposite order of their beginning, on their own thread");
  innermost = outer_;
}

std::optional<at::Generator> RandomScope::current(at::Device device) {
  if (innermost == nullptr || !c10::impl::tls_is_dispatch_key_included(kScopeKey)) {
    return std::nullopt;
  }
  return device.is_cpu() ? innermost->generator() : innermost->generator(device);
}

bool RandomScope::is_open() {
  return innermost != nullptr;
}

const at::Generator& RandomScope::generator(at::Device device) {
  for (const at::Generator& known : device_generators_) {
    if (known.device() == device) return known;
  }
  return device_generators_.emplace_back(internal::make_generator(device, hash_));
}

const at::Generator& RandomScope::generator() {
  if (generators.size() <= depth_) {
    generators.resize(depth_ + 1);
  }
  at::Generator& generator = generators[depth_];
  if (!seeded_) {
    // A caller may still hold the generator of an earlier scope; leave that one unchanged.
    if (!generator.defined() || generator.getIntrusivePtr().use_count() > 1) {
      generator = at::detail::createCPUGenerator();
    }
    seed_generator(*generator.get<at::CPUGeneratorImpl>(), hash_);
    seeded_ = true;
  }
  return generator;
}

}  // namespace penstock
