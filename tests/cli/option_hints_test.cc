#include "penstock/cli/option_hints.h"

#include <gtest/gtest.h>

namespace penstock::internal::cli {
namespace {

bool any(const std::string& /*name*/) {
  return true;
}

TEST(OptionHints, NameTheOptionForEachPieceOfAdvice) {
  EXPECT_EQ(with_option_hints("step 7: the loss is nan.\n  Hint: lower the learning rate, or skip such steps.", any),
            "step 7: the loss is nan.\n  Hint: lower the learning rate (--learning-rate), or skip such steps "
            "(--on-nonfinite skip).");
}

TEST(OptionHints, NameOptionsOfTheCommandOnly) {
  EXPECT_EQ(with_option_hints("step 7: the loss is nan.\n  Hint: lower the learning rate, or skip such steps.",
                              [](const std::string& name) { return name == "--on-nonfinite"; }),
            "step 7: the loss is nan.\n  Hint: lower the learning rate, or skip such steps (--on-nonfinite skip).");
}

TEST(OptionHints, LeaveOtherMessagesAsTheyAre) {
  EXPECT_EQ(with_option_hints("model.pt2: could not be read.", any), "model.pt2: could not be read.");
  EXPECT_EQ(with_option_hints("", any), "");
}

}  // namespace
}  // namespace penstock::internal::cli
