#include "penstock/program/reader/size_expression.h"

#include <gtest/gtest.h>

namespace penstock::internal::testing {

namespace {

const std::string kLength = "Symbol('s77', positive=True, integer=True)";
const std::string kWidth = "Symbol('s3', integer=True)";

TEST(SizeExpression, IsWrittenAsPeopleDo) {
  const auto text = [](const std::string& expression) { return read_size_expression(expression).text; };
  EXPECT_EQ(text(kLength), "s77");
  EXPECT_EQ(text("Integer(-4)"), "-4");
  EXPECT_EQ(text("Mul(Integer(2), " + kLength + ")"), "2*s77");
  EXPECT_EQ(text("Add(Mul(Integer(2), " + kLength + "), Integer(-1))"), "2*s77 - 1");
  EXPECT_EQ(text("Mul(Integer(4), Add(" + kLength + ", " + kWidth + "))"), "4*(s77 + s3)");
  EXPECT_EQ(text("Pow(" + kLength + ", Integer(2))"), "s77**2");
  EXPECT_EQ(text("Mul(Integer(3), FloorDiv(" + kLength + ", Integer(2)))"), "3*(s77//2)");
  EXPECT_EQ(text("Min(Integer(32), " + kLength + ")"), "Min(32, s77)");
}

TEST(SizeExpression, OfAnotherFormIsLeftAsItIs) {
  std::string deep = kLength;
  for (int i = 0; i < 200'000; ++i) deep = "Abs(" + deep;
  for (const std::string& text : {std::string(), std::string("s0"), std::string("2*s0"), "Mul(" + kLength,
                                  kLength + ")", std::string("Integer(x)"), std::string("Symbol(s)"),
                                  std::string("Integer(99999999999999999999)"), std::string("Add()"), deep}) {
    const SizeExpression read = read_size_expression(text);
    EXPECT_EQ(read.text, text);
    EXPECT_FALSE(read.linear);
  }
}

TEST(SizeExpression, IsAMultipleOfASymbolAndANumberOrNot) {
  const auto linear = [](const std::string& expression) -> std::string {
    const auto found = read_size_expression(expression).linear;
    if (!found) return "none";
    return std::to_string(found->factor) + " " + found->symbol + " " + std::to_string(found->offset);
  };
  EXPECT_EQ(linear(kLength), "1 s77 0");
  EXPECT_EQ(linear("Integer(7)"), "0  7");
  EXPECT_EQ(linear("Mul(Integer(2), " + kLength + ", Integer(3))"), "6 s77 0");
  EXPECT_EQ(linear("Mul(" + kLength + ", Integer(2))"), "2 s77 0");
  EXPECT_EQ(linear("Add(Mul(Integer(2), " + kLength + "), Integer(-1), " + kLength + ")"), "3 s77 -1");
  EXPECT_EQ(linear("Mul(Integer(2), Add(" + kLength + ", Integer(5)))"), "2 s77 10");
  EXPECT_EQ(linear("Mul(" + kLength + ", " + kLength + ")"), "none");
  EXPECT_EQ(linear("Add(" + kLength + ", " + kWidth + ")"), "none");
  EXPECT_EQ(linear("Pow(" + kLength + ", Integer(2))"), "none");
  EXPECT_EQ(linear("Mul(Integer(4611686018427387904), Integer(4))"), "none");
}

}  // namespace
}  // namespace penstock::internal::testing
