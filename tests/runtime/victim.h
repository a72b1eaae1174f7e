// Exit codes of victim.cc.
#pragma once

namespace penstock::internal::testing {

// The rank has reported the lost rank as expected.
inline constexpr int kNoticed = 10;
inline constexpr int kWrongWords = 11;
inline constexpr int kTooLate = 12;
inline constexpr int kNothingHappened = 13;

}  // namespace penstock::internal::testing
