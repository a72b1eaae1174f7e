#include "penstock/train/checkpoint_info.h"

#include <cstdint>
#include <iomanip>
#include <random>
#include <sstream>

namespace penstock::internal {

std::string new_run_id() {
  std::random_device random;
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  constexpr int kWords = 4;
  for (int i = 0; i < kWords; ++i) text << std::setw(2 * sizeof(std::uint32_t)) << std::uint32_t{random()};
  return text.str();
}

}  // namespace penstock::internal
