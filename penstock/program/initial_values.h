// Initial values of models that were exported on the meta device, whose files have the shapes of weights and no values.
// So a model that is larger than any one machine can be exported, cut, and initialised stage by stage:
//
//   with torch.device("meta"):                                # in Python
//       model, x = MyModel(), torch.zeros(2, 32, dtype=torch.int64)
//   torch.export.save(torch.export.export(model, (x,)), "model.pt2")
//
//   Program program("model.pt2");
//   program.initialise(/*seed=*/0);
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace penstock {

// Writes the initial values of a parameter, which requires a gradient, or of a buffer into `values`. Random operators
// draw from a RandomScope that depends on the seed and the name alone. It must not use the program.
using InitialValues = std::function<void(const std::string& name, at::Tensor& values)>;

}  // namespace penstock
