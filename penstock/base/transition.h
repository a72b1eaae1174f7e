// TRANSITION: makes internal names visible in penstock while the layers move. To be removed.
#pragma once
namespace penstock {
namespace internal {}
using namespace internal;
}  // namespace penstock
