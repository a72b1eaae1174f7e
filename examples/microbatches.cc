#include <ATen/ATen.h>

#include <iostream>
#include <vector>

#include "penstock/tensor/attention.h"
#include "penstock/tensor/microbatch.h"

int main() {
  // Ten rows with two documents each. A token attends to earlier tokens of the same document.
  const at::Tensor ids = (at::arange(128) >= at::randint(1, 128, {10, 1})).to(at::kLong);
  const penstock::MaskMod same_document = [ids](const at::Tensor& b, const at::Tensor&, const at::Tensor& q,
                                                const at::Tensor& kv) {
    return (ids.index({b, q}) == ids.index({b, kv})).logical_and(q >= kv);
  };
  const penstock::BlockMask mask = penstock::create_block_mask(same_document, 10, {}, 128, 128, 16);
  std::cout << mask.index({0}) << "\n";

  // Each microbatch gets its rows of the tensor and of the mask. The mask function still receives rows of the whole batch.
  const at::Tensor x = at::randn({10, 4, 128, 32});
  const auto [args, kwargs] = penstock::split_args_kwargs_into_chunks({x}, {{"mask", mask.to_ivalue()}}, 4);
  std::vector<c10::IValue> outputs;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const at::Tensor chunk = args[i][0].toTensor();
    const auto& chunk_mask = penstock::BlockMask::from_ivalue(kwargs[i].at("mask"));
    outputs.emplace_back(penstock::flex_attention(chunk, chunk, chunk, nullptr, chunk_mask));
    std::cout << "microbatch " << i << ": rows of " << chunk.sizes() << ", " << chunk_mask.description() << "\n";
  }

  const at::Tensor merged = penstock::merge_chunks(outputs).toTensor();
  const at::Tensor whole = penstock::flex_attention(x, x, x, nullptr, mask);
  std::cout << "merged output bitwise identical to the whole: " << (at::equal(merged, whole) ? "yes" : "no") << "\n";
}
