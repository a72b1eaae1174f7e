#include "penstock/tensor/cpu_kernels.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// libtorch_cpu exports these where it was built with MKL; elsewhere they are null.
extern "C" {
[[gnu::weak]] int mkl_serv_cbwr_set(int mode);
[[gnu::weak]] int mkl_serv_cbwr_get(int option);
}

namespace penstock {
namespace {

// Values of MKL's MKL_CBWR_… constants.
constexpr int kMklAll = ~0;
constexpr int kMklAuto = 2;
constexpr int kMklCompatible = 3;
constexpr int kMklStrict = 0x10000;

// Longer than any attempt takes on a machine that is busy.
constexpr unsigned kAttemptSeconds = 10;

bool is_set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

bool has_mkl() {
  return mkl_serv_cbwr_set != nullptr && mkl_serv_cbwr_get != nullptr;
}

bool mkl_ignores_alignment() {
  const int mode = mkl_serv_cbwr_get(kMklAll);
  return (mode & kMklStrict) != 0 || mode == kMklCompatible;
}

void make_products_reproducible() {
  if (!has_mkl() || is_set("MKL_CBWR")) return;
  mkl_serv_cbwr_set(kMklAuto | kMklStrict);
  if (const auto reason = why_not_reproducible()) TORCH_WARN(*reason);
}

#if defined(__x86_64__)
bool names_amx() {
  constexpr unsigned kBfloat16 = 1U << 22U;
  constexpr unsigned kTile = 1U << 24U;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & (kBfloat16 | kTile)) != 0;
}

// Asks the kernel for the tiles, as oneDNN does, and multiplies two of them.
void use_amx() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  ::syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  // Palette 1, and tiles 0 to 2 of 16 rows with 64 bytes each.
  alignas(64) std::array<std::uint8_t, 64> configuration{};
  configuration[0] = 1;
  for (std::size_t tile = 0; tile < 3; ++tile) {
    configuration[16 + 2 * tile] = 64;
    configuration[48 + tile] = 16;
  }
  asm volatile(
      "ldtilecfg %0\n\t"
      "tilezero %%tmm0\n\t"
      "tilezero %%tmm1\n\t"
      "tilezero %%tmm2\n\t"
      "tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t"
      "tilerelease"
      :
      : "m"(configuration)
      : "memory");
}
#else
bool names_amx() {
  return false;
}
void use_amx() {}
#endif

bool amx_works() {
  return internal::survives(use_amx);
}

void keep_to_allowed_instructions() {
  if (is_set("ONEDNN_MAX_CPU_ISA") || is_set("DNNL_MAX_CPU_ISA")) return;
  // oneDNN reads the variable at its first primitive.
  if (const auto limit = internal::onednn_limit(names_amx(), amx_works)) {
    ::setenv("ONEDNN_MAX_CPU_ISA", limit->c_str(), /*overwrite=*/1);
  }
}

}  // namespace

// The build names this symbol to the linker, so that every program that links the library has this file, and with it the
// preparation, whatever else it uses.
extern "C" const bool penstock_cpu_kernels_prepared;
const bool penstock_cpu_kernels_prepared = [] {
  make_products_reproducible();
  keep_to_allowed_instructions();
  return true;
}();

std::optional<std::string> why_not_reproducible() {
  if (!has_mkl() || mkl_ignores_alignment()) return std::nullopt;
  const std::string effect = "Products may differ in their last bits by where a tensor lies in memory: ";
  if (is_set("MKL_CBWR")) {
    return effect + "MKL_CBWR=" + std::getenv("MKL_CBWR") +
           " does not ask MKL for strict reproducibility.\n  Hint: unset MKL_CBWR, or set MKL_CBWR=AUTO,STRICT.";
  }
  return effect +
         "MKL was used before Penstock was loaded, too late to make it reproducible.\n"
         "  Hint: load Penstock before the first operator runs, or set MKL_CBWR=AUTO,STRICT.";
}

void prepare_vector_functions() {
  [[maybe_unused]] static const bool ready = at::sqrt(at::ones(1)).defined();
}

namespace internal {

bool survives(void (*attempt)()) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) {
    // Neither the program's handlers nor a core file are for a signal that is expected here.
    struct sigaction action{};
    action.sa_handler = SIG_DFL;
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP, SIGALRM}) ::sigaction(signal, &action, nullptr);
    const rlimit none{};
    ::setrlimit(RLIMIT_CORE, &none);
    ::alarm(kAttemptSeconds);
    attempt();
    const char done = 1;
    ::_exit(::write(ends[1], &done, 1) == 1 ? 0 : 1);
  }
  ::close(ends[1]);
  char done = 0;
  if (child > 0) {
    // Ends when the child does, which has an alarm.
    while (::read(ends[0], &done, 1) < 0 && errno == EINTR) {
    }
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  ::close(ends[0]);
  return done == 1;
}

std::optional<std::string> onednn_limit(bool names_amx, bool (*amx_works)()) {
  if (!names_amx || amx_works()) return std::nullopt;
  return "AVX512_CORE_BF16";
}

}  // namespace internal
}  // namespace penstock
