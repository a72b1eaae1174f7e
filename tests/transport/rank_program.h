// Exit codes of rank_program.cc.
#pragma once

namespace penstock::internal::testing {

inline constexpr int kWrong = 2;
inline constexpr int kNothing = 4;
inline constexpr int kAborter = 5;
inline constexpr int kAborted = 6;
inline constexpr int kAbortedByOther = 7;
// The peer of the error, which may be -1, is added to these.
inline constexpr int kTimeout = 20;
inline constexpr int kPeerLost = 40;

}  // namespace penstock::internal::testing
