// Replaces gloo's header of this name; see gloo/context.h.
#pragma once

namespace gloo::transport {

class Device;

}  // namespace gloo::transport
