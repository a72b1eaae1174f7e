// Stands in for gloo's header of this name, which torch's wheel does not have. ProcessGroupGloo.hpp needs these types to
// be declared and no more: its objects are made and used inside libtorch only. What is declared here has to have the
// names and arguments that it has in gloo; nothing of it is ever called, derived from or laid out by us.
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
