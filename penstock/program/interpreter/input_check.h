// Checks the arguments of a program against the types and the dynamic shapes of its export.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Checks the inputs of one call. Remembers the sizes that symbols stand for, so that two inputs with one symbol have to
// agree.
class InputCheck {
 public:
  // The exported program has to outlive the check.
  explicit InputCheck(const ExportedProgram& exported) : exported_(&exported) {}

  // Throws ProgramError, which names the input, what was found and what is expected.
  void check(const ProgramInput& input, const c10::IValue& given);

 private:
  void check_tensor(const std::string& name, const TensorType& type, const at::Tensor& tensor);
  void check_size(const std::string& place, const Dimension& dimension, std::int64_t size);

  const ExportedProgram* exported_;
  // Size of each symbol, and the dimension that determined it.
  std::map<std::string, std::pair<std::int64_t, std::string>> seen_;
};

}  // namespace penstock::internal
