// A model in stages as a picture.
#pragma once

#include <iosfwd>

#include "penstock/program/pipe.h"

namespace penstock::cli {

// SVG: a box for each stage, from top to bottom, and what crosses beside the arrows; skips go around.
void draw_pipe(std::ostream& out, const PipeInfo& info);

}  // namespace penstock::cli
