#include "penstock/train/generate_text.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/tensor/random_scope.h"

namespace penstock::internal {

std::string generate_text(Pipeline& pipeline, int length, const std::string& prompt,
                          const GenerateTextOptions& options) {
  // Without a prompt, generation starts after a newline, as a text that follows another one in the training data.
  std::string text = prompt.empty() ? "\n" : prompt;
  const int rows = pipeline.schedule().microbatches() * pipeline.replicas();
  for (int i = 0; i < options.bytes; ++i) {
    const std::string context =
        text.substr(text.size() - std::min<std::size_t>(text.size(), static_cast<std::size_t>(length)));
    // Causal attention ignores the padding after the context. Padding to a constant length keeps cached shapes valid.
    const at::Tensor ids = at::zeros({rows, length}, at::kLong);
    for (std::size_t k = 0; k < context.size(); ++k) {
      ids.select(1, static_cast<std::int64_t>(k))
          .fill_(static_cast<std::int64_t>(static_cast<unsigned char>(context[k])));
    }
    const StepResult result = pipeline.eval({ids}, {}, {}, {.results_everywhere = true});
    const at::Tensor logits = result.output.toTensor()[0][static_cast<std::int64_t>(context.size()) - 1].cpu();
    std::int64_t chosen = 0;
    if (options.temperature > 0) {
      const RandomScope scope(options.seed, /*step=*/i, /*microbatch=*/0, /*place=*/0);
      chosen = at::multinomial(at::softmax(logits / options.temperature, -1), 1).item<std::int64_t>();
    } else {
      chosen = logits.argmax().item<std::int64_t>();
    }
    text.push_back(static_cast<char>(chosen));
  }
  return text;
}

}  // namespace penstock::internal
