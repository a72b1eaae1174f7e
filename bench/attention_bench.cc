// The Penstock side of bench/attention.py. Reads one request per line from standard input, and answers each with a
// line. Uses one thread, 1 × 8 heads × LENGTH × 64 in float32, and a causal mask with a window of 256.
//
//   forward LENGTH   seconds for a forward
//   both LENGTH      seconds for a forward and a backward
//   mask LENGTH      seconds to create the block mask
//   memory LENGTH    peak bytes of a forward and a backward, without their inputs and the mask
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "bench/answering.h"
#include "penstock/tensor/attention.h"

namespace penstock::internal::bench {
namespace {

using bench::seconds;

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kSize = 64;
constexpr std::int64_t kWindow = 256;

at::Tensor in_window(const at::Tensor& /*b*/, const at::Tensor& /*h*/, const at::Tensor& q, const at::Tensor& kv) {
  return (q >= kv).logical_and(q - kv < kWindow);
}

struct Problem {
  explicit Problem(std::int64_t length) : mask(create_block_mask(in_window, {}, {}, length, length)) {
    for (at::Tensor* tensor : {&query, &key, &value, &seed}) *tensor = at::randn({1, kHeads, length, kSize});
    // Compute the mask's plan before the clock starts.
    flex_attention(query, key, value, nullptr, mask);
  }

  void forward() const { flex_attention(query, key, value, nullptr, mask); }
  void both() const {
    const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().requires_grad_(); };
    flex_attention(leaf(query), leaf(key), leaf(value), nullptr, mask).backward(seed);
  }

  BlockMask mask;
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor seed;
};

// Returns a value of /proc/self/status in bytes.
std::int64_t status(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string word; in >> word;) {
    std::int64_t kilobytes = 0;
    if (word == name + ":" && in >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

template <class Act>
std::int64_t peak_memory(const Act& act) {
  // Reset the peak, VmHWM.
  std::ofstream("/proc/self/clear_refs") << 5;
  const std::int64_t before = status("VmRSS");
  act();
  return status("VmHWM") - before;
}

int answer_questions() {
  at::set_num_threads(1);
  std::map<std::int64_t, Problem> problems;
  std::string what;
  std::int64_t length = 0;
  while (std::cin >> what >> length) {
    const Problem& problem = problems.try_emplace(length, length).first->second;
    if (what == "forward") {
      std::cout << seconds([&] { problem.forward(); }) << std::endl;
    } else if (what == "both") {
      std::cout << seconds([&] { problem.both(); }) << std::endl;
    } else if (what == "mask") {
      std::cout << seconds([&] { create_block_mask(in_window, {}, {}, length, length); }) << std::endl;
    } else if (what == "memory") {
      std::cout << peak_memory([&] { problem.both(); }) << std::endl;
    } else {
      std::cerr << "'" << what << "' is none of forward, both, mask and memory\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace penstock::internal::bench

int main() {
  return penstock::internal::bench::run(penstock::internal::bench::answer_questions);
}
