// Reads reference results from files that torch.save has written.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock::internal::testing {

// Returns the elements of a list, which outlive it.
inline std::vector<c10::IValue> items(const c10::IValue& list) {
  return list.toListRef().vec();
}

// Returns the list in a file of the directory that an environment variable names.
inline std::vector<c10::IValue> read_pickled(const char* variable, const std::string& file) {
  const char* const folder = std::getenv(variable);
  if (folder == nullptr) throw std::runtime_error(std::string(variable) + " should name a directory with " + file);
  const auto path = std::filesystem::path(folder) / file;
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  if (bytes.empty()) throw std::runtime_error(path.string() + " is empty or missing");
  return items(torch::jit::pickle_load(bytes));
}

}  // namespace penstock::internal::testing
