// Vector clocks: for each stream, the number of its operations that are known to be complete at some point of a program.
// Operation n of stream s happens before a point exactly if the point's clock has n or more for s.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::sim {

class VectorClock {
 public:
  std::uint64_t time_of(int stream) const {
    const auto index = static_cast<std::size_t>(stream);
    return index < times_.size() ? times_[index] : 0;
  }
  bool covers(int stream, std::uint64_t time) const { return time_of(stream) >= time; }

  // Advances the time of the stream that this clock belongs to, and returns it.
  std::uint64_t advance(int stream) {
    const auto index = static_cast<std::size_t>(stream);
    if (times_.size() <= index) times_.resize(index + 1);
    return ++times_[index];
  }

  void merge(const VectorClock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<std::uint64_t> times_;
};

}  // namespace penstock::sim
