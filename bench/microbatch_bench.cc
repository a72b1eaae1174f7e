// The Penstock side of bench/microbatch.py. Reads one request per line from standard input, and answers each with a
// line.
//
//   TENSORS ROWS COLUMNS GRAD CHUNKS REPEATS   seconds to split the tensors by their rows, and to merge the chunks again,
//                                              the medians of REPEATS; GRAD is 1 if they are leaves that require grad
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/answering.h"
#include "penstock/tensor/microbatch.h"

namespace penstock::internal::bench {
namespace {

using bench::seconds;

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times.at(times.size() / 2);
}

void answer(std::size_t tensors, std::int64_t rows, std::int64_t columns, bool grad, std::int64_t chunks, int repeats) {
  Args args;
  std::vector<c10::IValue> specs;
  for (std::size_t i = 0; i < tensors; ++i) {
    args.emplace_back(at::rand({rows, columns}).requires_grad_(grad));
    specs.push_back(TensorChunkSpec(0));
  }
  const c10::IValue spec = c10::ivalue::Tuple::create(specs);
  std::vector<double> splitting;
  std::vector<double> merging;
  for (int i = 0; i < repeats; ++i) {
    SplitArgs split;
    splitting.push_back(seconds([&] { split = split_args_kwargs_into_chunks(args, {}, chunks, spec); }));
    // Merge tuples, as stages return them.
    std::vector<c10::IValue> outputs;
    outputs.reserve(split.args.size());
    for (Args& chunk : split.args) outputs.emplace_back(c10::ivalue::Tuple::create(std::move(chunk)));
    c10::IValue merged;
    merging.push_back(seconds([&] { merged = merge_chunks(outputs, spec); }));
  }
  std::cout << median(splitting) << " " << median(merging) << std::endl;
}

int answer_questions() {
  at::set_num_threads(1);
  // As in microbatch.py: keep freed memory, as page faults of merged tensors would dominate otherwise.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  std::size_t tensors = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool grad = false;
  std::int64_t chunks = 0;
  int repeats = 0;
  while (std::cin >> tensors >> rows >> columns >> grad >> chunks >> repeats) {
    answer(tensors, rows, columns, grad, chunks, repeats);
  }
  return 0;
}

}  // namespace
}  // namespace penstock::internal::bench

int main() {
  return penstock::internal::bench::run(penstock::internal::bench::answer_questions);
}
