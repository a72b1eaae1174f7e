// The secret that the ranks of a job share, and HMAC-SHA-256 signatures with it, computed by OpenSSL.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace penstock::internal {

// The shared secret of a job. An empty token protects from nothing, but its signatures still distinguish the values of
// handshakes. Immutable.
class JobToken {
 public:
  explicit JobToken(std::string secret = {}) : secret_(std::move(secret)) {}

  // Returns a token of 256 random bits. Throws std::runtime_error if the system provides no random numbers.
  static JobToken random();

  const std::string& secret() const { return secret_; }

  // Returns the signature of a list of texts, kSignatureSize characters long. Lists that differ, even if only in where
  // texts are split, have different signatures.
  std::string sign(std::span<const std::string> texts) const;
  // Returns true if `signature` is that of these texts. Takes constant time, so that it reveals nothing of the
  // signature.
  bool verifies(std::span<const std::string> texts, std::string_view signature) const;

  static constexpr std::size_t kSignatureSize = 64;

 private:
  std::string secret_;
};

// Joins texts into one, each preceded by its length.
std::string join_texts(std::span<const std::string> texts);
// Returns the texts that join_texts has joined. Throws std::invalid_argument for other input.
std::vector<std::string> split_texts(std::string_view joined);

// Thrown when a value of a signed store was not written with the store's token under the key that it is read by.
class UnsignedValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns a store below `prefix` in which every value is signed. Counters (add) are not signed. Calls that cannot be
// signed (append, multiGet, queues) throw std::logic_error.
c10::intrusive_ptr<c10d::Store> signed_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                                             JobToken token);

}  // namespace penstock::internal
