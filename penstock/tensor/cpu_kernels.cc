#include "penstock/tensor/cpu_kernels.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>
#include <c10/util/Exception.h>

#include <cstdlib>

#include "penstock/tensor/cpu_instructions.h"

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

}  // namespace

// Runs before the static objects of a program are constructed, as these may call operators. The build passes this
// symbol to the linker as undefined, so that every program that links the static library contains this object.
extern "C" [[gnu::constructor(101)]] void penstock_prepare_cpu_kernels() {
  make_products_reproducible();
  internal::limit_onednn_instructions();
}

std::optional<std::string> why_not_reproducible() {
  if (!has_mkl() || mkl_ignores_alignment()) return std::nullopt;
  const std::string effect = "Products may differ in their last bits with the alignment of tensors in memory: ";
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

}  // namespace penstock
