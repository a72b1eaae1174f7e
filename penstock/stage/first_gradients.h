// Serialises backwards that give a parameter its first gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::internal {

// Backwards on several threads may have parameters in common. Autograd locks a parameter's accumulator while it adds to
// an existing .grad, but not until a first gradient belongs to the parameter alone. While a FirstGradients lives, its
// thread is the only one that runs a backward to the parameters that had no gradient when it was made.
class FirstGradients {
 public:
  // Blocks while another thread gives one of these parameters its first gradient. Parameters may be listed several
  // times.
  explicit FirstGradients(const std::vector<at::Tensor>& parameters);
  ~FirstGradients();
  FirstGradients(const FirstGradients&) = delete;
  FirstGradients& operator=(const FirstGradients&) = delete;

  // Copies each of the new gradients whose storage is shared. Autograd makes an incoming gradient the .grad of a
  // parameter when nothing else refers to the tensor, but does not look at its storage, which may also be that of a
  // parameter's gradient that met this one in a sum of views, or that of a stage's input: what is added to one gradient
  // later would be added to the other.
  void copy_shared_storages() const;

 private:
  // The parameters without a gradient, some several times.
  std::vector<at::Tensor> parameters_;
};

}  // namespace penstock::internal
