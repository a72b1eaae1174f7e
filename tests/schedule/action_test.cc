#include "penstock/schedule/action.h"

#include <gtest/gtest.h>

#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

TEST(Action, IsSmall) {
  EXPECT_LE(sizeof(Action), 20U);
}

TEST(Action, PrintsAndParsesAsPyTorchsText) {
  const std::vector<std::pair<Action, std::string>> cases = {
      {forward(0, 1), "0F1"},
      {input_backward(2, 3), "2I3"},
      {weight_backward(2, 3), "2W3"},
      {full_backward(12, 345), "12B345"},
      {recomputation(2, 3), "2R3"},
      {message(1, Computation::SendForward, 0, 2), "1SEND_F0"},
      {message(2, Computation::RecvForward, 0, 1), "2RECV_F0"},
      {message(2, Computation::SendBackward, 0, 1), "2SEND_B0"},
      {message(1, Computation::RecvBackward, 0, 2), "1RECV_B0"},
      {parameters(0, Computation::Unshard), "0UNSHARD"},
      {parameters(0, Computation::Reshard), "0RESHARD"},
      {parameters(0, Computation::ReduceGrad), "0REDUCE_GRAD"},
      {overlap(forward(0, 1), full_backward(3, 0)), "(0F1;3B0)OVERLAP_F_B"},
  };
  for (const auto& [action, text] : cases) {
    EXPECT_EQ(to_string(action), text);
    EXPECT_EQ(parse_action(text), action) << text;
  }
}

TEST(Action, NamesTheOtherEndOffTheChainOnly) {
  EXPECT_EQ(to_string(message(1, Computation::SendForward, 0, 3)), "1SEND_F0@3");
  EXPECT_EQ(to_string(message(3, Computation::RecvForward, 0, 1)), "3RECV_F0@1");
  EXPECT_EQ(to_string(message(3, Computation::SendBackward, 0, 1)), "3SEND_B0@1");
  EXPECT_EQ(to_string(message(1, Computation::RecvBackward, 0, 3)), "1RECV_B0@3");
  EXPECT_EQ(parse_action("1SEND_F0@3").other_stage, 3);
  EXPECT_EQ(to_string(parse_action("1SEND_F0@2")), "1SEND_F0");
  EXPECT_EQ(to_string(parameters(4, Computation::SumShared)), "4SUM_SHARED");
  EXPECT_EQ(parse_action("4SUM_SHARED"), parameters(4, Computation::SumShared));
}

TEST(Action, LeavesOutWhiteSpaceAround) {
  EXPECT_EQ(parse_action(" \t0F1\r\n"), forward(0, 1));
}

TEST(Action, HasACounterpartForEachMessage) {
  for (const char* text : {"1SEND_F0", "2RECV_F0@0", "3SEND_B1", "1RECV_B4@5"}) {
    const Action action = parse_action(text);
    EXPECT_EQ(counterpart(counterpart(action)), action);
    EXPECT_NE(counterpart(action).is_send(), action.is_send());
  }
  EXPECT_EQ(to_string(counterpart(parse_action("1SEND_F0"))), "2RECV_F0");
}

// PyTorch reads "1F0junk" as 1F0 and "2F" as a forward of no microbatch.
TEST(Action, RefusesWhatIsNoActionAndSaysWhy) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "an empty text is not an action"},
      {"2X4", "'2X4' is not an action: unknown computation 'X'.\n  Hint: the computations are F, I, W, B, R, UNSHARD"},
      {"1F0junk", "unexpected 'junk' at its end"},
      {"2F", "F must be followed by a microbatch"},
      {"F0", "it must begin with the index of a stage"},
      {"-1F0", "it must begin with the index of a stage"},
      {"1F-2", "F must be followed by a microbatch"},
      {"99999999999F0", "a number in it is too large"},
      {"3", "no computation after the stage"},
      {"0f1", "unknown computation 'f'"},
      {"0UNSHARD3", "unexpected '3' at its end"},
      {"0SEND_F1@", "'@' must be followed by the stage at the other end"},
      {"0F1@2", "unexpected '@2' at its end"},
      {"0OVERLAP_F_B", "OVERLAP_F_B must follow a pair"},
      {"(0F1;3B0)", "OVERLAP_F_B must follow the parts of a pair"},
      {"(0F1)OVERLAP_F_B", "a pair has exactly two parts"},
      {"(0F1;3B0;1W0)OVERLAP_F_B", "a pair has exactly two parts"},
      {"(0F1;3R0)OVERLAP_F_B", "the parts of a pair must be F, I, W or B, not '3R0'"},
      {"(0F1;3SEND_B0)OVERLAP_F_B", "the parts of a pair must be F, I, W or B, not '3SEND_B0'"},
      {"((0F1;1F0)OVERLAP_F_B;3B0)OVERLAP_F_B", "the parts of a pair cannot be pairs"},
      {"(0F1;3B0)OVERLAP_F_Bx", "unexpected 'x' at its end"},
      {std::string("0F1\0", 4), "unexpected '?' at its end"},
  };
  for (const auto& entry : cases) expect_error([&] { parse_action(entry.first); }, entry.second);
}

}  // namespace
}  // namespace penstock::internal::testing
