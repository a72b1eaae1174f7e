// Splits a tensor and merges the chunks again.
#include <ATen/ATen.h>
#include <penstock/penstock.h>

#include <cstdlib>
#include <iostream>
#include <vector>

int main() {
  try {
    const at::Tensor x = at::arange(10);
    std::vector<c10::IValue> outputs;
    for (const penstock::Args& args : penstock::split_args_kwargs_into_chunks({x}, {}, 4).args) {
      outputs.emplace_back(args[0].toTensor() * 2);
    }
    const at::Tensor merged = penstock::merge_chunks(outputs).toTensor();
    std::cout << outputs.size() << " chunks, merged to " << merged.size(0) << " that sum to "
              << merged.sum().item<int>() << "\n";
  } catch (const penstock::ChunkError& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
