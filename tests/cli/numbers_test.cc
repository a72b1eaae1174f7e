// Numbers as people read them.
#include "penstock/cli/train/numbers.h"

#include <gtest/gtest.h>

namespace penstock::internal::cli {
namespace {

TEST(Numbers, AreShort) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.00123), "0.0012");
  EXPECT_EQ(short_number(0.4), "0.4");
  EXPECT_EQ(short_number(3), "3");
  EXPECT_EQ(short_number(3.14159), "3.1");
  EXPECT_EQ(short_number(42.3), "42");
  EXPECT_EQ(short_number(1234), "1.23 k");
  EXPECT_EQ(short_number(56'789'000), "56.8 M");
}

TEST(Numbers, OfSecondsAreMinutesToo) {
  EXPECT_EQ(clock_text(4.4), "0:04");
  EXPECT_EQ(clock_text(64), "1:04");
  EXPECT_EQ(clock_text(3661), "61:01");
}

}  // namespace
}  // namespace penstock::internal::cli
