#include "penstock/tensor/cpu_instructions.h"

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

namespace penstock::internal {
namespace {

// Longer than any attempt takes on a busy machine.
constexpr unsigned kAttemptSeconds = 10;

bool is_set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

#if defined(__x86_64__)
bool reports_amx() {
  constexpr unsigned kBfloat16 = 1U << 22U;
  constexpr unsigned kTile = 1U << 24U;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & (kBfloat16 | kTile)) != 0;
}

// Requests permission for AMX tiles from the kernel, as oneDNN does, and multiplies two of them.
void use_amx() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  ::syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  // Palette 1; tiles 0 to 2 have 16 rows of 64 bytes.
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
bool reports_amx() {
  return false;
}
void use_amx() {}
#endif

bool amx_works() {
  return survives(use_amx);
}

}  // namespace

void limit_onednn_instructions() {
  if (is_set("ONEDNN_MAX_CPU_ISA") || is_set("DNNL_MAX_CPU_ISA")) return;
  if (const auto limit = onednn_limit(reports_amx(), amx_works)) {
    ::setenv("ONEDNN_MAX_CPU_ISA", limit->c_str(), /*overwrite=*/1);
  }
}

bool survives(void (*attempt)()) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) {
    // A signal is expected here: restore the default handlers and write no core file.
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
    // Returns at the latest when the child exits, and its alarm bounds that.
    while (::read(ends[0], &done, 1) < 0 && errno == EINTR) {
    }
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  ::close(ends[0]);
  return done == 1;
}

std::optional<std::string> onednn_limit(bool reports_amx, bool (*amx_works)()) {
  if (!reports_amx || amx_works()) return std::nullopt;
  return "AVX512_CORE_BF16";
}

}  // namespace penstock::internal
