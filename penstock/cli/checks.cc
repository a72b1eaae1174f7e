#include "penstock/cli/checks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include "penstock/base/nearest.h"
#include "penstock/base/text.h"
#include "penstock/cli/byte_units.h"
#include "penstock/cli/read_number.h"

namespace penstock::internal::cli {

namespace {

// Accepts text that is a number of this type for which `holds` returns true.
template <class Number, class Holds>
CLI::Validator number_that(const Holds& holds, const std::string& expected) {
  return {[holds, expected](const std::string& text) {
            const std::optional<Number> value = read_number<Number>(text);
            return value && holds(*value) ? std::string() : "'" + text + "' should be " + expected;
          },
          ""};
}

}  // namespace

CLI::Validator size_in_bytes() {
  return {[](const std::string& text) {
            return parse_bytes(text)
                       ? ""
                       : "'" + text + "' should be a size above 0 with its unit, such as 512MiB, 2GB or 4096B";
          },
          ""};
}

CLI::Validator whole_number() {
  return number_that<int>([](int value) { return value >= 1; }, "a whole number from 1 on");
}

CLI::Validator seed() {
  return number_that<std::uint64_t>([](std::uint64_t) { return true; }, "a whole number from 0 to 2^64 - 1");
}

CLI::Validator cost() {
  return number_that<double>([](double value) { return std::isfinite(value) && value >= 0; },
                             "a number that is not negative");
}

CLI::Validator float_number() {
  return number_that<double>(
      [](double value) { return value >= 0 && value <= static_cast<double>(std::numeric_limits<float>::max()); },
      "a number from 0 to 3.4e38, the largest of float32");
}

CLI::Validator duration() {
  return number_that<double>([](double value) { return std::isfinite(value) && value > 0; }, "a number above 0");
}

CLI::Validator path() {
  return {[](const std::string& text) {
            return text.empty() ? std::string("'' should be a path, and is empty") : std::string();
          },
          ""};
}

CLI::Validator one_of(std::vector<std::string> words) {
  return {[words = std::move(words)](const std::string& word) {
            if (std::ranges::find(words, word) != words.end()) return std::string();
            const auto near = nearest(word, words);
            return "'" + word + "' is none of " + join_or_none(words) + (near ? "; did you mean " + *near + "?" : "");
          },
          ""};
}

}  // namespace penstock::internal::cli
