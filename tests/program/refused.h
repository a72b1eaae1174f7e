// Reads handmade archives as programs, and expects the errors of those that are refused.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "penstock/program/program.h"
#include "tests/program/archives.h"
#include "tests/program/programs.h"

namespace penstock::internal::testing {

inline Program read(const std::string& bytes) {
  return Program::from_bytes(bytes, "small");
}
inline Program read(const std::vector<Record>& records) {
  return read(zipped(records));
}

inline void expect_records_refused(const std::vector<Record>& records, const std::string& words) {
  expect_refused([&] { read(records); }, words);
}
inline void expect_model_refused(const json& model, const std::string& words) {
  expect_records_refused(small_records(model), "small: models/model.json" + words);
}
inline void expect_weights_refused(const json& weights, const std::string& words) {
  expect_records_refused(small_records(small_model(), weights),
                         "small: data/weights/model_weights_config.json" + words);
}

}  // namespace penstock::internal::testing
