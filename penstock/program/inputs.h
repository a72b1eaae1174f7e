// Inputs and outputs of a program as named tensors, which is how safetensors files contain them. An input has the name
// of its path in the arguments, "args.0", "kwargs.mask" or "args.1.ids"; an output that of its index, "output.0".
//
//   const TensorsByName batch = example_inputs(program, /*microbatches=*/4, /*seed=*/0);
//   for (const Arguments& inputs : split_arguments(program, batch, 4)) program.run(inputs.args, inputs.kwargs);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "penstock/program/program.h"
#include "penstock/tensor/microbatch.h"

namespace penstock {

using TensorsByName = std::map<std::string, at::Tensor>;

struct Arguments {
  Args args;
  Kwargs kwargs;
};

// Returns the arguments that the tensors stand for. An input that is a number is given as a tensor whose elements all
// have its value; fixed inputs are added. Throws ProgramError for a missing or an unknown name, and lists the names.
Arguments arguments_from(const Program& program, const TensorsByName& tensors);

// Returns random inputs for `microbatches` microbatches of the export's example sizes, concatenated along dimension 0:
// normally distributed floats, and integers that are valid indices of the embeddings that take them.
TensorsByName example_inputs(const Program& program, int microbatches, std::uint64_t seed);

// Returns the number of microbatches of the example's size in these inputs, or 0 if their number of rows is dynamic.
int microbatches_in(const Program& program, const TensorsByName& tensors);

// Splits each tensor along dimension 0 as a Pipeline does: if the rows do not divide evenly, the first microbatches
// have one more. Throws ProgramError for a tensor with too few rows, and for an uneven split of an input whose number
// of rows is static.
std::vector<TensorsByName> split_inputs(const Program& program, const TensorsByName& tensors, int microbatches);
// Like split_inputs, but returns the arguments of each microbatch.
std::vector<Arguments> split_arguments(const Program& program, const TensorsByName& tensors, int microbatches);

// Flattens the outputs of all microbatches and concatenates each along dimension 0. Numbers become vectors with one
// element for each microbatch; None and other objects are dropped.
TensorsByName outputs_by_name(const std::vector<c10::IValue>& outputs);

}  // namespace penstock
