// What goes over a connection between two ranks. A message is its tensors, one after the other, those without bytes left
// out. How they look is told in a header ahead of them, or known from an earlier step: see begin_step in transport.h.
// Then each channel opens a step with one small message that says which of the two it is.
//
// A receiver does not wait for that: it posts receives for what it knows at once, so that a message is on its way in one
// go when nothing has changed. When something has, the sender fills these receives with anything, as they cannot be taken
// back, and the message follows with a header.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/tensor/metadata.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

using Metas = std::vector<std::optional<TensorMeta>>;

enum class MessageKind : std::uint8_t {
  Opening,
  Header,
  // Of known sizes.
  Data,
  // Of sizes that a header has told, and what of a header did not fit into it.
  FreshData,
};

// The number that c10d matches a send and its receive by. Throws std::invalid_argument when the tag does not fit in it.
int wire_tag(Tag tag, MessageKind kind);

// Whether the messages of a channel have headers in this step.
enum class Headers : std::uint8_t {
  // It is said when the first message is sent, and not read yet.
  Unknown,
  Off,
  On,
};

// What this rank knows of the step that runs.
struct Step {
  // 0 until begin_step is called; headers are on until then and in the first step.
  std::uint64_t number = 0;
  std::uint64_t signature = 0;
  bool dynamic_shapes = false;
  // This rank's sizes are others than in the step before, or it was told that somebody's are.
  bool changed = false;
  // The rank that it waits for, or -1.
  std::atomic<int> waiting_for = -1;

  Headers at_begin() const { return dynamic_shapes || number <= 1 ? Headers::On : Headers::Unknown; }
  // Whether there is anything to learn for.
  bool learns() const { return !dynamic_shapes && number > 0; }
};

// How the messages of one channel looked in its last step with headers: by their number, and as there may be several of
// one number, in their order. Sender and receiver learn the same, and use it in the next step.
class ShapeCache {
 public:
  bool empty() const { return metas_.empty(); }
  void add(std::uint32_t number, Metas metas) { fresh_[number].push_back(std::move(metas)); }
  void begin_step();
  // The next one of this number in this step, or nullptr.
  const Metas* next(std::uint32_t number);

 private:
  using ByNumber = std::map<std::uint32_t, std::vector<Metas>>;
  ByNumber metas_;
  ByNumber fresh_;
  std::map<std::uint32_t, std::size_t> next_;
};

// A header has a fixed size and what does not fit follows in a second one.
inline constexpr std::size_t kHeaderBytes = 256;
struct HeaderBytes {
  std::string first;
  // Empty most often.
  std::string rest;
};
HeaderBytes encode_header(const Metas& metas);
// How many bytes follow the first part.
std::size_t rest_of_header(std::string_view first);
Metas decode_header(std::string_view first, std::string_view rest);

// Says what a tensor is that cannot be sent as bytes, and what can be; empty for one that can. Only dense tensors with
// elements in the CPU's memory can: no tensors of subclasses, wrappers, sparse, nested or opaque ones.
std::string why_unsendable(const at::Tensor& tensor);

// A tensor as it is sent: its elements without gaps, in the order that they have in memory, so that a transposed one
// arrives transposed. The tensor can be sent.
struct Packed {
  explicit Packed(const at::Tensor& given);

  std::optional<TensorMeta> meta() const;
  // The same as meta() == expected, without making one.
  bool looks_like(const std::optional<TensorMeta>& expected) const;

  // Undefined for None.
  at::Tensor tensor;
  bool requires_grad = false;
};

// The bytes of a tensor without gaps, in the same memory.
at::Tensor bytes_of(const at::Tensor& tensor);

// "message 3 of channel 4 to rank 1"
std::string name_of(Tag tag, const char* way, int peer);

}  // namespace penstock::internal
