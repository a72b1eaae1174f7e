// Arguments of a program by their names, "args.0", "kwargs.mask", "args.1.ids", and its outputs, "output.0".
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

// The arguments that these tensors are; what is a number is the one that its tensor is full of, and what the export has
// fixed is added. Throws ProgramError for a name that is missing or that there is not, with the names that there are.
Arguments arguments_from(const Program& program, const TensorsByName& tensors);

// Random inputs for so many microbatches of the example's sizes, behind each other along dimension 0: normal numbers, and
// integers that are good as indices of the embeddings that take them.
TensorsByName example_inputs(const Program& program, int microbatches, std::uint64_t seed);

// How many microbatches of the example's size these inputs are; 0 where that leaves the number of rows open.
int microbatches_in(const Program& program, const TensorsByName& tensors);

// Splits each tensor along dimension 0 as a Pipeline does: where the rows do not divide evenly, the first microbatches
// have one more. Throws ProgramError for a tensor with too few rows, and for an uneven split of an input whose number of
// rows the export has fixed.
std::vector<TensorsByName> split_inputs(const Program& program, const TensorsByName& tensors, int microbatches);
// The same as arguments.
std::vector<Arguments> split_arguments(const Program& program, const TensorsByName& tensors, int microbatches);

// The outputs of all microbatches, flattened, by their numbers: one microbatch behind the other along dimension 0, and what
// is a single number in a row. What is None, or no number, is left out.
TensorsByName outputs_by_name(const std::vector<c10::IValue>& outputs);

}  // namespace penstock
