// Archives made by hand as programs, and what is said of those that cannot be one.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "penstock/program/program.h"
#include "tests/program/archives.h"
#include "tests/program/programs.h"

namespace penstock::testing {

inline Program read(const std::string& bytes) {
  return Program(Archive(bytes, "small"));
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

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "penstock-program-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return *this / name;
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace penstock::testing
