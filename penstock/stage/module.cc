#include "penstock/stage/module.h"

#include <algorithm>
#include <iterator>

namespace penstock {

NamedTensors StageModule::written_tensors() const {
  NamedTensors written = state;
  std::ranges::copy_if(buffers, std::back_inserter(written),
                       [&](const auto& named) { return !constant_buffers.contains(named.first); });
  return written;
}

}  // namespace penstock
