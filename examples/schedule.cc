#include <iostream>

#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"

int main() {
  const penstock::Schedule schedule =
      penstock::lower(penstock::generate("ZBVZeroBubble", {.ranks = 4, .microbatches = 8}));
  const penstock::Costs costs;
  const penstock::Timeline timeline = penstock::simulate(schedule, costs);
  penstock::draw_text(std::cout, {schedule, timeline, costs, "ZBV"});
}
