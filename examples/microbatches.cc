#include <ATen/ATen.h>

#include <iostream>
#include <vector>

#include "penstock/tensor/attention.h"
#include "penstock/tensor/microbatch.h"

int main() {
  // Ten rows of two documents each; a token attends to those before it in its own document.
  const at::Tensor ids = (at::arange(128) >= at::randint(1, 128, {10, 1})).to(at::kLong);
  const penstock::MaskMod own_document = [ids](const at::Tensor& b, const at::Tensor&, const at::Tensor& q,
                                               const at::Tensor& kv) {
    return (ids.index({b, q}) == ids.index({b, kv})).logical_and(q >= kv);
  };
  const penstock::BlockMask mask = penstock::create_block_mask(own_document, 10, {}, 128, 128, 16);
  std::cout << mask.index({0}) << "\n";

  // Each microbatch has its rows of both, and the mask's function sees which rows of the batch they are.
  const at::Tensor x = at::randn({10, 4, 128, 32});
  const auto [args, kwargs] = penstock::split_args_kwargs_into_chunks({x}, {{"mask", mask.to_ivalue()}}, 4);
  std::vector<c10::IValue> outputs;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const at::Tensor chunk = args[i][0].toTensor();
    const auto& own_mask = penstock::BlockMask::from_ivalue(kwargs[i].at("mask"));
    outputs.emplace_back(penstock::flex_attention(chunk, chunk, chunk, nullptr, own_mask));
    std::cout << "microbatch " << i << ": rows of " << chunk.sizes() << ", " << own_mask.description() << "\n";
  }

  const at::Tensor merged = penstock::merge_chunks(outputs).toTensor();
  const at::Tensor whole = penstock::flex_attention(x, x, x, nullptr, mask);
  std::cout << "merged, it is the whole to the bit: " << (at::equal(merged, whole) ? "yes" : "no") << "\n";
}
