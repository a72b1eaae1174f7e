// The exit codes of victim.cc.
#pragma once

namespace penstock::testing {

// A rank has seen what it should have seen when another was lost.
inline constexpr int kNoticed = 10;
inline constexpr int kWrongWords = 11;
inline constexpr int kTooLate = 12;
inline constexpr int kNothingHappened = 13;

}  // namespace penstock::testing
