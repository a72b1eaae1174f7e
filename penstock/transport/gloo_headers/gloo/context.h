// Replaces gloo's header of this name, which PyTorch's wheel does not contain. ProcessGroupGloo.hpp only needs these
// types to be declared, as their objects are created and used inside libtorch. The declarations must have the names and
// arguments that they have in gloo. Penstock never calls them, derives from them or depends on their layout. Private:
// only gloo.cc includes these headers.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);  // NOLINT(readability-identifier-naming): gloo's
};

namespace transport {

class UnboundBuffer;

}  // namespace transport
}  // namespace gloo
