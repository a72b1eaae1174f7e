// Draws a model that is split into stages.
#pragma once

#include <iosfwd>

#include "penstock/program/pipe.h"

namespace penstock::internal::cli {

// Writes an SVG with a box for each stage, from top to bottom, and arrows with the names of the boundary values. Arrows
// of skip connections go around the boxes.
void draw_pipe(std::ostream& out, const Pipe& pipe);

}  // namespace penstock::internal::cli
