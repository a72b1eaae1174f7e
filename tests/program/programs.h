// Programs that models.py has exported, and their weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "penstock/program/program.h"
#include "penstock/tensor/safetensors.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

inline std::string program_path(const std::string& file) {
  const char* const folder = std::getenv("PENSTOCK_PROGRAMS");
  EXPECT_NE(folder, nullptr) << "PENSTOCK_PROGRAMS should be a folder that models.py has written.";
  return (folder == nullptr ? "" : folder) + ("/" + file);
}

inline Program exported(const std::string& name) {
  return Program(program_path(name + ".pt2"));
}

// Returns the results of eager PyTorch by name.
inline std::map<std::string, at::Tensor> expected_of(const std::string& name) {
  const NamedTensors read = read_safetensors(program_path(name + ".expected.safetensors"));
  return {read.begin(), read.end()};
}

// Expects that `act` throws a ProgramError that contains these words.
inline void expect_refused(const std::function<void()>& act, const std::string& words) {
  try {
    act();
    ADD_FAILURE() << "no error, instead of: " << words;
  } catch (const ProgramError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
        << "message: " << error.what() << "\nwanted:  " << words;
  }
}

inline std::map<std::string, at::Tensor> by_name(const NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

inline std::set<std::string> names_in(const NamedTensors& tensors) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) names.insert(name);
  return names;
}

inline NamedTensors copies(const NamedTensors& tensors) {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) result.emplace_back(name, tensor.detach().clone());
  return result;
}

inline void expect_equal(const NamedTensors& expected, const NamedTensors& found) {
  ASSERT_EQ(names_in(expected), names_in(found));
  const std::map<std::string, at::Tensor> of_found = by_name(found);
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(same(tensor.detach(), of_found.at(name).detach())) << name;
  }
}

}  // namespace penstock::internal::testing
