// The exit codes of rank_program.cc.
#pragma once

namespace penstock::testing {

inline constexpr int kWrong = 2;
inline constexpr int kNothing = 4;
inline constexpr int kAborter = 5;
inline constexpr int kAborted = 6;
inline constexpr int kAbortedByOther = 7;
// And the rank that it was about, which may be -1.
inline constexpr int kLate = 20;
inline constexpr int kGone = 40;

}  // namespace penstock::testing
