// Computes which activations each rank saves for its backwards, and from which action to which: from the schedule
// alone, without times. memory.h has their sizes.
//
//   for (const SavedActivations& saved : activation_liveness(schedule, /*rank=*/0)) {
//     std::cout << saved.stage << " " << saved.microbatch << ": " << saved.begin.action << " to " << saved.end.action;
//   }
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock {

// Place of a computation in a rank's actions.
struct ActionPlace {
  std::size_t action = 0;
  // True for the second part of a pair.
  bool second_part = false;

  friend auto operator<=>(const ActionPlace&, const ActionPlace&) = default;
};

// Memory that a rank saves for the backward of one stage and microbatch, during some of its actions.
struct SavedActivations {
  enum class Kind : std::uint8_t {
    // Inputs of a forward that will be recomputed: from the start of F to the start of R.
    Inputs,
    // All that the backward needs: from the start of F, or of R, to the end of I or B.
    Activations,
    // The part that the weight gradient alone needs: from the end of I to the end of W.
    WeightInputs,
  };

  int stage = 0;
  int microbatch = 0;
  Kind kind = Kind::Activations;
  // The computations at which it begins and ends: see Kind.
  ActionPlace begin;
  ActionPlace end;

  friend bool operator==(const SavedActivations&, const SavedActivations&) = default;
};

// Returns what a rank saves, in the order of the places where it begins. In a schedule without backwards, a forward has
// its activations in memory while it runs. Requires a schedule that verify_each_list accepts.
std::vector<SavedActivations> activation_liveness(const Schedule& schedule, int rank);

// Returns the largest number of microbatches whose activations a rank saves at a time. Those of which only inputs are
// saved, for a recomputation, do not count.
int peak_activations(const Schedule& schedule, int rank);

namespace internal {

// True if the rank computes weight gradients. Without them, a forward frees its activations when it ends.
bool has_weight_gradients(const Schedule& schedule, int rank);

}  // namespace internal

}  // namespace penstock
