#include "penstock/cli/checks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "penstock/schedule/nearest.h"

namespace penstock::cli {

CLI::Validator whole_number() {
  return {[](const std::string& text) {
            int value = 0;
            const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool good = read.ec == std::errc() && read.ptr == text.data() + text.size() && value >= 1;
            return good ? std::string() : "'" + text + "' should be a whole number from 1 on";
          },
          ""};
}

CLI::Validator cost() {
  return {[](const std::string& text) {
            double value = 0;
            const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool good =
                read.ec == std::errc() && read.ptr == text.data() + text.size() && std::isfinite(value) && value >= 0;
            return good ? std::string() : "'" + text + "' should be a number that is not negative";
          },
          ""};
}

CLI::Validator one_of(std::vector<std::string> words) {
  return {[words = std::move(words)](const std::string& word) {
            if (std::ranges::find(words, word) != words.end()) return std::string();
            std::string all;
            for (const std::string& each : words) all += (all.empty() ? "" : ", ") + each;
            const auto near = nearest(word, words);
            return "'" + word + "' is none of " + all + (near ? "; did you mean " + *near + "?" : "");
          },
          ""};
}

}  // namespace penstock::cli
