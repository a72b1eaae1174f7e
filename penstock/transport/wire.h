// The format of messages between two process ranks. A message is the bytes of its tensors, one send for each tensor
// that has any. Their metadata is sent in a header before them, or known from an earlier step (see
// Transport::begin_step). In the latter case each channel begins a step with a one-byte opening, which announces if its
// messages have headers.
//
// A receiver does not wait for the opening: it posts receives of the cached shapes at once, so that nothing but the
// data is on the critical path while shapes stay the same. If they have changed, the sender fills these receives with
// filler bytes, as a posted receive cannot be cancelled, and sends the message with a header.
//
// Messages from device to device have the same openings and headers. Their data is sent through a device backend, and
// received there when it is known to have the cached shapes or those of the header, so that they need no filler.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/tensor/metadata.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Metadata of the tensors of a message; nullopt for None.
using Metas = std::vector<std::optional<TensorMeta>>;

enum class MessageKind : std::uint8_t {
  // Announces if the messages of a channel have headers in this step.
  Opening,
  Header,
  // Tensors, or filler, in the cached shapes.
  Data,
  // Tensors in the shapes of a header, and the rest of a header that does not fit into kHeaderBytes.
  FreshData,
  // Synchronises the hosts at the end of a step. It belongs to no channel.
  EndOfStep,
};

// Throws std::invalid_argument if the tag's channel or number is greater than `limit`.
void require_tag_within(Tag tag, std::uint32_t limit);

// Returns the number by which c10d matches a send and its receive. Throws std::invalid_argument if the tag does not
// fit.
int wire_tag(Tag tag, MessageKind kind);

// States of a channel: its messages in this step have headers, have none, or it is not known yet.
enum class Headers : std::uint8_t {
  // The channel's opening has not been sent, or not been received.
  Unknown,
  Off,
  On,
};

// State of the current step that the send and receive queues share. Used by the rank's thread, except for waiting_for.
struct TransportStep {
  // 0 until begin_step is called. Headers are on until then and in the first step.
  std::uint64_t number = 0;
  std::uint64_t signature = 0;
  bool dynamic_shapes = false;
  // This rank's signature differs from that of the previous step, or a peer's opening has announced that its signature
  // does.
  bool changed = false;
  // The rank that this one waits for, or kNoPeer. Read by any thread.
  std::atomic<int> waiting_for = TransportError::kNoPeer;

  // Returns the state of a channel when the step begins.
  Headers initial_headers() const { return dynamic_shapes || number <= 1 ? Headers::On : Headers::Unknown; }
  // Returns true if shapes are cached for later steps.
  bool caches_shapes() const { return !dynamic_shapes && number > 0; }
};

// The opening of a channel whose messages are sent from device to device. It is sent in every step.
struct DirectOpening {
  Headers headers = Headers::On;
  // Digest of the order in which the sender sends the messages of the link.
  std::uint64_t digest = 0;
};
inline constexpr std::size_t kDirectOpeningBytes = 1 + sizeof(std::uint64_t);
std::string encode_direct_opening(const DirectOpening& opening);
DirectOpening decode_direct_opening(std::string_view bytes);

// Metadata of the messages of one channel in its last step with headers, by message number. Several messages of one
// number are kept in their order. Sender and receiver fill their caches alike, and use them from the next step on.
class ShapeCache {
 public:
  bool empty() const { return metas_.empty(); }
  // Adds the metadata of a message of this step.
  void add(std::uint32_t number, Metas metas) { fresh_[number].push_back(std::move(metas)); }
  // Replaces the cache by what was added in the previous step, if anything was.
  void begin_step();
  // Returns the metadata that the next message of this number is expected to have in this step; nullptr if unknown. The
  // pointer is valid until begin_step().
  const Metas* next(std::uint32_t number);

 private:
  using ByNumber = std::map<std::uint32_t, std::vector<Metas>>;
  ByNumber metas_;
  ByNumber fresh_;
  // Number of messages of this step that next() has returned.
  std::map<std::uint32_t, std::size_t> next_;
};

// Size of a header's first part. It is fixed, as the receive is posted before the header's size is known; what does not
// fit is sent in a second part.
inline constexpr std::size_t kHeaderBytes = 256;
struct HeaderBytes {
  std::string first;
  // Empty for most messages.
  std::string rest;
};
HeaderBytes encode_header(const Metas& metas);
// Returns the size of the second part, 0 if there is none.
std::size_t rest_of_header(std::string_view first);
Metas decode_header(std::string_view first, std::string_view rest);

// Returns why a tensor cannot be sent as bytes, and what can be sent; empty if it can. Only dense tensors with elements
// in the memory of the CPU or of an accelerator can: no tensor subclasses, wrappers, sparse, nested or opaque tensors.
std::string why_unsendable(const at::Tensor& tensor);

// A tensor in the form in which it is sent: its elements without gaps, in the order of memory, so that a transposed
// tensor arrives transposed.
struct Packed {
  // Requires a tensor that can be sent. Copies it only if it has gaps.
  explicit Packed(const at::Tensor& given);

  std::optional<TensorMeta> meta() const;
  // Returns meta() == expected, without the cost of building one.
  bool matches(const std::optional<TensorMeta>& expected) const;

  // Undefined for None.
  at::Tensor tensor;
  bool requires_grad = false;
};

// Returns the bytes of a tensor without gaps, in the same memory and the same order.
at::Tensor bytes_of(const at::Tensor& tensor);

// Throws the error of a message without cached shapes in a step without headers. `from` is its sender.
[[noreturn]] void throw_not_in_cached_step(Tag tag, int from);

// Returns a name for errors: "message 3 of channel 4 to rank 1". `direction` is "to" or "from".
std::string name_of(Tag tag, const char* direction, int peer);

}  // namespace penstock::internal
