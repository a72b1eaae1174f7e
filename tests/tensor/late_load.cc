// Computes a product before it loads Penstock, which is then too late to make MKL reproducible and logs a warning.
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <dlfcn.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): unsetenv is POSIX's

#include <iostream>

int main(int count, char** arguments) {
  ::unsetenv("MKL_CBWR");
  if (count != 2 || at::mm(at::ones({2, 2}), at::ones({2, 2})).numel() != 4) return 2;
  if (::dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) != nullptr) return 0;
  std::cerr << ::dlerror() << "\n";
  return 2;
}
