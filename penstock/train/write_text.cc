#include "penstock/train/write_text.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "penstock/tensor/random_scope.h"

namespace penstock::internal {

std::string write_text(Pipeline& pipeline, int length, const std::string& text, const WriteTextOptions& options) {
  // An empty text begins with a new line, as texts do behind others.
  std::string written = text.empty() ? "\n" : text;
  const int rows = pipeline.schedule().microbatches() * pipeline.replicas();
  for (int i = 0; i < options.bytes; ++i) {
    const std::string read =
        written.substr(written.size() - std::min<std::size_t>(written.size(), static_cast<std::size_t>(length)));
    // What stands behind the text is not looked at. The same sizes all the time let shapes be learnt once.
    const at::Tensor ids = at::zeros({rows, length}, at::kLong);
    for (std::size_t at = 0; at < read.size(); ++at) {
      ids.select(1, static_cast<std::int64_t>(at))
          .fill_(static_cast<std::int64_t>(static_cast<unsigned char>(read[at])));
    }
    const StepResult result = pipeline.eval({ids}, {}, {}, {.results_everywhere = true});
    const at::Tensor logits = result.output.toTensor()[0][static_cast<std::int64_t>(read.size()) - 1];
    std::int64_t chosen = 0;
    if (options.temperature > 0) {
      const RandomScope scope(options.seed, /*step=*/i, /*microbatch=*/0, /*place=*/0);
      chosen = at::multinomial(at::softmax(logits / options.temperature, -1), 1).item<std::int64_t>();
    } else {
      chosen = logits.argmax().item<std::int64_t>();
    }
    written.push_back(static_cast<char>(chosen));
  }
  return written;
}

}  // namespace penstock::internal
