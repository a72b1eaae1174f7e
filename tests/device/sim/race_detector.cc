// The part of the simulation that finds races, and that restricts the host's access to pinned memory.
#include <ATen/core/Tensor.h>
#include <sys/mman.h>

#include <algorithm>
#include <sstream>

#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// Number of accesses to a block that are remembered before those are dropped that cannot matter any more.
constexpr std::size_t kManyAccesses = 64;

// Returns the number of bytes from a tensor's first element to the end of its last one. Gaps between strides count.
std::size_t extent_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return static_cast<std::size_t>(last + 1) * tensor.element_size();
}

}  // namespace

std::string Simulation::text_of(const Access& access, const Block& block) const {
  const c10::Stream& stream = queues_[static_cast<std::size_t>(access.stream)]->stream();
  const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(block.base);
  std::ostringstream text;
  text << access.operation << (access.writes ? " writes" : " reads") << " bytes " << access.low - base << " to "
       << access.high - base << " (tensor " << c10::IntArrayRef(access.sizes) << ") on stream " << stream.id()
       << " of device " << static_cast<int>(stream.device_index());
  return text.str();
}

std::string Simulation::access(StreamQueue& queue, const char* operation, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  const void* const pointer = tensor.const_data_ptr();
  Block* const block = blocks_.find(pointer);
  if (block == nullptr) return {};
  const auto low = reinterpret_cast<std::uintptr_t>(pointer);
  const Access now{.low = low,
                   .high = low + extent_of(tensor),
                   .stream = queue.index(),
                   .time = queue.clock.time_of(queue.index()),
                   .writes = writes,
                   .operation = operation,
                   .sizes = c10::SmallVector<std::int64_t, 4>(tensor.sizes().begin(), tensor.sizes().end()),
                   .generation = block->generation};
  const Access* conflict = nullptr;
  for (const Access& previous : block->accesses) {
    if (previous.high <= now.low || previous.low >= now.high || !(previous.writes || writes)) continue;
    if (previous.stream == now.stream || queue.clock.covers(previous.stream, previous.time)) continue;
    conflict = &previous;
  }
  std::string race;
  if (conflict != nullptr) {
    std::ostringstream text;
    text << "race in a block of " << block->bytes << " bytes on "
         << (block->device == kPinned ? "the host (pinned)" : "device " + std::to_string(block->device)) << ": "
         << text_of(now, *block) << ", and nothing orders it after " << text_of(*conflict, *block) << ".";
    if (conflict->generation != block->generation) {
      text << "\n  The block was freed and allocated again in between.\n  Hint: record_stream delays the reuse of a "
              "block that another stream uses.";
    } else {
      text << "\n  Hint: record an event on the first stream and let the second one wait for it.";
    }
    race = text.str();
    ++counters_.races;
    races_.push_back(race);
  }
  // Later accesses that are ordered after this one are ordered after those that it replaces, unless there was a race.
  std::erase_if(block->accesses, [&now](const Access& previous) {
    const bool covered = previous.low >= now.low && previous.high <= now.high;
    return covered && (now.writes || (!previous.writes && previous.stream == now.stream));
  });
  // Nothing can race with an access that the host has waited for.
  if (block->accesses.size() >= kManyAccesses) {
    std::erase_if(block->accesses,
                  [this](const Access& previous) { return host_.covers(previous.stream, previous.time); });
  }
  block->accesses.push_back(now);
  if (block->device == kPinned) protect(*block);
  return race;
}

void Simulation::protect(Block& block) {
  DualMapping::protect(block.base, block.bytes, PROT_READ | PROT_WRITE);
  bool restricted = false;
  // Pages that are written come last, as they allow the host nothing.
  for (const bool writes : {false, true}) {
    for (const Access& access : block.accesses) {
      if (access.writes != writes || host_.covers(access.stream, access.time)) continue;
      restricted = true;
      DualMapping::protect(reinterpret_cast<char*>(access.low), access.high - access.low,
                           writes ? PROT_NONE : PROT_READ);
    }
  }
  if (restricted) {
    protected_blocks_.insert(&block);
  } else {
    protected_blocks_.erase(&block);
  }
}

void Simulation::host_has_waited(const VectorClock& clock) {
  host_.merge(clock);
  const std::set<Block*> blocks = protected_blocks_;
  for (Block* block : blocks) protect(*block);
}

}  // namespace penstock::sim
