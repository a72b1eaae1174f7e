// A program that does not link the simulated device: loads it from the path that is its argument, and uses it.
#include <ATen/ATen.h>
#include <dlfcn.h>

#include <cstdio>

int main(int count, char** words) {
  if (count != 2) return 2;
  void* const library = ::dlopen(words[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return 2;
  }
  const auto install = reinterpret_cast<int (*)()>(::dlsym(library, "penstock_device_install"));
  for (const char* const name : {"penstock_device_backend", "penstock_device_id"}) {
    if (::dlsym(library, name) == nullptr) return 2;
  }
  if (install == nullptr || install() != 0) return 2;
  // Alive when the process exits.
  static const at::Tensor sum = at::ones({8}, at::Device("sim:3")) + 1;
  return sum.sum().item<float>() == 16 ? 0 : 1;
}
