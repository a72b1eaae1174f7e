// Calls each operator that a program may call with random arguments, on guarded memory: every tensor borders on a page
// that cannot be read or written, so that a kernel that accesses memory out of bounds crashes at once. libtorch is not
// built for the sanitizers, which see only what calls into libc.
//
//   penstock_operator_fuzz TRIALS [SEED [NAME…]]
//
// Each operator runs in its own process. Prints the operators that crashed, with their arguments, and exits with 1 if
// there were any. A timeout is not a finding: programs have a time limit.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/program/interpreter/operator_checks.h"
#include "penstock/program/reader/allowed_operators.h"

namespace penstock::internal::testing {

namespace {

using c10::IValue;
using c10::TypeKind;

constexpr int kCrashed = 3;
constexpr int kTookTooLong = 4;
constexpr unsigned kSeconds = 20;

// Allocates each tensor between two guard pages.
class GuardedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    constexpr std::size_t kMost = std::size_t{64} << 20U;
    constexpr std::size_t kAlignment = 16;
    const c10::Device cpu(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &release, cpu};
    if (size > kMost) throw std::bad_alloc();
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t body = (size + page - 1) / page * page;
    void* const mapped =
        ::mmap(nullptr, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const begin = static_cast<char*>(mapped) + page;
    ::mprotect(begin, body, PROT_READ | PROT_WRITE);
    // Fills the memory, so that reads of uninitialised memory give wild values.
    std::memset(begin, 0x5a, body);
    // Most tensors border on the guard page after them, some on the one before.
    const std::size_t offset = ++count_ % 4 == 0 ? 0 : body - (size + kAlignment - 1) / kAlignment * kAlignment;
    void* const data = begin + offset;
    blocks()[data] = {mapped, body + 2 * page};
    return {data, data, &release, cpu};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

 private:
  struct Block {
    void* begin = nullptr;
    std::size_t size = 0;
  };
  static std::map<void*, Block>& blocks() {
    static auto* const all = new std::map<void*, Block>();
    return *all;
  }
  static void release(void* data) {
    const auto block = blocks().find(data);
    if (block == blocks().end()) return;
    ::munmap(block->second.begin, block->second.size);
    blocks().erase(block);
  }

  std::size_t count_ = 0;
};

class Arguments {
 public:
  explicit Arguments(std::uint64_t seed) : random_(seed) {
    at::manual_seed(random_());
    for (int i = below(5); i > 0; --i) common_.push_back(chance(0.05) ? 0 : 1 + below(4));
  }

  std::vector<IValue> of(const c10::FunctionSchema& schema) {
    std::vector<IValue> values;
    for (const c10::Argument& argument : schema.arguments()) {
      values.push_back(argument.default_value() && chance(0.5)
                           ? *argument.default_value()
                           : value(*argument.type(), argument.name(), argument.N()));
    }
    return values;
  }
  bool chance(double probability) { return std::uniform_real_distribution<>()(random_) < probability; }

 private:
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }
  template <class List>
  auto one_of(const List& list) {
    return list[static_cast<std::size_t>(below(static_cast<int>(std::size(list))))];
  }

  std::int64_t integer() {
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    static constexpr auto kWild = std::to_array<std::int64_t>(
        {-1, 0, 1, 7, 64, 1000, std::int64_t{1} << 31, std::int64_t{1} << 40, kLeast, kMost, kMost - 1});
    return chance(0.85) ? below(8) - 2 : one_of(kWild);
  }

  at::Tensor tensor() {
    static constexpr auto kTypes = std::to_array<at::ScalarType>(
        {at::kFloat, at::kFloat, at::kFloat, at::kFloat, at::kDouble, at::kLong, at::kLong, at::kLong, at::kInt,
         at::kBool, at::kByte, at::kChar, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kShort});
    static constexpr auto kSizes = std::to_array<std::int64_t>({0, 1, 1, 2, 3, 4, 5, 8});
    const at::ScalarType type = one_of(kTypes);
    std::vector<std::int64_t> sizes = common_;
    if (chance(0.4)) {
      sizes.clear();
      for (int i = below(6); i > 0; --i) sizes.push_back(one_of(kSizes));
    }
    at::Tensor made;
    if (at::isIntegralType(type, /*includeBool=*/true)) {
      const int least = chance(0.7) ? 0 : -4;
      made = at::randint(least, least + (chance(0.7) ? 3 : 12), sizes, at::kLong).to(type);
      if (type == at::kLong && made.numel() > 0 && chance(0.15)) {
        made.view(-1)[below(static_cast<int>(made.numel()))].fill_(integer());
      }
    } else {
      made = at::randn(sizes, at::kFloat).to(type);
      if (made.numel() > 0 && chance(0.1)) {
        made.view(-1)[below(static_cast<int>(made.numel()))].fill_(chance(0.5) ? NAN : INFINITY);
      }
    }
    if (made.dim() >= 2 && chance(0.15)) made = made.transpose(0, 1);
    if (made.dim() >= 1 && made.size(0) > 1 && chance(0.1)) {
      made = made.slice(0, 0, std::numeric_limits<std::int64_t>::max(), 2);
    }
    if (made.dim() < 5 && chance(0.05)) {
      std::vector<std::int64_t> expanded(made.sizes().begin(), made.sizes().end());
      expanded.insert(expanded.begin(), 3);
      made = made.unsqueeze(0).expand(expanded);
    }
    return made;
  }

  IValue value(const c10::Type& type, const std::string& name, std::optional<int> count) {
    static constexpr auto kTypes = std::to_array<at::ScalarType>(
        {at::kFloat, at::kDouble, at::kLong, at::kBool, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kInt});
    static constexpr auto kFloats = std::to_array<double>({0, 1, -1, 0.5, 2, 1e30, NAN, INFINITY, 0.1, 1e-5});
    static constexpr auto kTexts = std::to_array<const char*>(
        {"sum",      "mean", "prod",  "amax", "amin",  "none",   "tanh",      "floor",    "trunc",   "ij",
         "xy",       "L",    "U",     "fro",  "nuc",   "linear", "nearest",   "constant", "reflect", "replicate",
         "circular", "same", "valid", "left", "right", "gelsd",  "ij,jk->ik", "",         "x"});
    switch (type.kind()) {
      case TypeKind::OptionalType:
        return chance(0.4) ? IValue() : value(*type.castRaw<c10::OptionalType>()->getElementType(), name, count);
      case TypeKind::TensorType: return tensor();
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        if (name == "dtype") return static_cast<std::int64_t>(one_of(kTypes));
        if (name == "layout") return static_cast<std::int64_t>(chance(0.9) ? 0 : below(3));
        if (name == "memory_format") return static_cast<std::int64_t>(below(4));
        return integer();
      case TypeKind::FloatType:
      case TypeKind::SymFloatType: return one_of(kFloats);
      case TypeKind::BoolType:
      case TypeKind::SymBoolType: return chance(0.5);
      case TypeKind::NumberType: return chance(0.5) ? IValue(integer()) : IValue(below(5) - 0.5);
      case TypeKind::StringType: return std::string(one_of(kTexts));
      case TypeKind::DeviceObjType: return c10::Device(c10::kCPU);
      case TypeKind::ListType: {
        const c10::TypePtr element = type.castRaw<c10::ListType>()->getElementType();
        const bool of_integers = element->kind() == TypeKind::IntType || element->kind() == TypeKind::SymIntType;
        if (of_integers && chance(0.15)) return common_;
        int size = chance(0.5) ? static_cast<int>(common_.size()) : below(5);
        if (count && chance(0.9)) size = *count;
        c10::impl::GenericList list(of_integers ? c10::TypePtr(c10::IntType::get()) : element);
        for (int i = 0; i < size; ++i) list.push_back(value(*element, "", {}));
        return list;
      }
      default: return {};
    }
  }

  std::mt19937_64 random_;
  // Sizes of most tensors of a call.
  std::vector<std::int64_t> common_;
};

std::string text_of(const IValue& value) {
  std::ostringstream text;
  if (value.isTensor()) {
    text << value.toTensor().scalar_type() << value.toTensor().sizes() << value.toTensor().strides();
  } else if (value.isList()) {
    text << "[";
    for (const IValue& element : value.toListRef()) text << text_of(element) << ", ";
    text << "]";
  } else {
    text << value;
  }
  return std::move(text).str();
}

// Read by the signal handler.
std::string& current_call() {
  static std::string text;
  return text;
}

void on_crash(int signal) {
  const std::string& text = current_call();
  static_cast<void>(!::write(STDOUT_FILENO, text.data(), text.size()));
  ::_exit(signal == SIGALRM ? kTookTooLong : kCrashed);
}

// Reads all elements of a result.
void read(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.is_sparse()) {
      tensor.to_dense();
    } else if (tensor.layout() == at::kStrided && tensor.numel() < 100000) {
      tensor.clone();
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) read(tensor);
  }
}

void call(const c10::OperatorHandle& handle, std::uint64_t seed) {
  Arguments random(seed);
  std::vector<IValue> stack;
  try {
    stack = random.of(handle.schema());
    std::string text = "(";
    for (const IValue& value : stack) text += text_of(value) + "; ";
    current_call() = text + "), seed " + std::to_string(seed) + "\n";
    const c10::AutoGradMode mode(random.chance(0.5));
    if (const ArgumentCheck check = find_argument_check(handle.operator_name())) check(stack);
    handle.callBoxed(&stack);
    for (const IValue& value : stack) read(value);
  } catch (const std::exception&) {
    // The operator or its check has refused the arguments, as it should.
  }
}

[[noreturn]] void run_child(const c10::OperatorHandle& handle, int trials, std::uint64_t seed) {
  static GuardedMemory memory;
  c10::SetCPUAllocator(&memory, /*priority=*/10);
  static std::array<char, 1U << 16U> stack{};
  stack_t alternative{};
  alternative.ss_sp = stack.data();
  alternative.ss_size = stack.size();
  ::sigaltstack(&alternative, nullptr);
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGILL, SIGALRM}) {
    struct sigaction action{};
    action.sa_handler = on_crash;
    action.sa_flags = SA_ONSTACK;
    ::sigaction(number, &action, nullptr);
  }
  constexpr rlim_t kAddresses = rlim_t{8} << 30U;
  const rlimit addresses{.rlim_cur = kAddresses, .rlim_max = kAddresses};
  ::setrlimit(RLIMIT_AS, &addresses);
  // Silences MKL and the warnings of libtorch.
  static_cast<void>(!std::freopen("/dev/null", "w", stderr));
  ::alarm(kSeconds);
  std::seed_seq mixed{seed,
                      static_cast<std::uint64_t>(std::hash<std::string>()(c10::toString(handle.operator_name())))};
  std::vector<std::uint32_t> seeds(static_cast<std::size_t>(trials));
  mixed.generate(seeds.begin(), seeds.end());
  for (const std::uint32_t one : seeds) call(handle, one);
  ::_exit(0);
}

// Returns the arguments of the call that crashed; empty if none did.
std::string crash_of(const c10::OperatorHandle& handle, int trials, std::uint64_t seed) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("no pipe can be had.");
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[0]);
    run_child(handle, trials, seed);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> buffer{};
  for (ssize_t count = 0; (count = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  const bool is_good = WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kTookTooLong);
  return is_good ? "" : text.empty() ? "without a word\n" : text;
}

int run(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 100;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const std::vector<std::string> wanted(argv + std::min(argc, 3), argv + argc);
  at::set_num_threads(1);
  // libtorch selects kernels at the first call: do it once, before the forks.
  at::mm(at::sqrt(at::ones({4, 4})), at::ones({4, 4}));
  const AllowedOperators allowed;
  int called = 0;
  int crashed = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_wanted = wanted.empty() || std::ranges::find(wanted, c10::toString(name)) != wanted.end();
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!is_wanted || !handle || !allowed.contains(name)) continue;
    ++called;
    if (const std::string arguments = crash_of(*handle, trials, seed); !arguments.empty()) {
      ++crashed;
      std::cout << c10::toString(name) << arguments << std::flush;
    }
  }
  std::cout << called << " operators, " << trials << " calls each, seed " << seed << ": " << crashed << " crashed\n";
  return crashed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  return penstock::internal::testing::run(argc, argv);
}
