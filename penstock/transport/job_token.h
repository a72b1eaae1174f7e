// The secret that the ranks of a job share, and signatures by it: HMAC-SHA-256, of OpenSSL.
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

// An empty token is no secret: it keeps nobody out, and its signatures still tell one job's values from another's.
class JobToken {
 public:
  explicit JobToken(std::string secret = {}) : secret_(std::move(secret)) {}

  // Returns a token that nobody can guess. Throws std::runtime_error when the system has no random numbers.
  static JobToken random();

  const std::string& secret() const { return secret_; }

  // Returns kSignatureSize characters. Two lists of texts have the same signature only if they are the same list.
  std::string sign(std::span<const std::string> texts) const;
  // Returns true if `signature` is that of these texts. How long it takes says nothing about where they differ.
  bool verifies(std::span<const std::string> texts, std::string_view signature) const;

  static constexpr std::size_t kSignatureSize = 64;

 private:
  std::string secret_;
};

// Joins texts into one, each preceded by its length.
std::string join_texts(std::span<const std::string> texts);
// Returns the texts that join_texts has joined. Throws std::invalid_argument for anything else.
std::vector<std::string> split_texts(std::string_view joined);

// Thrown when a value is read from a signed store that was not written with its token under its key.
class UnsignedValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns a store below `prefix` in which every value is signed. Numbers (add) are not signed, and calls that would pass
// the signature by (append, multiGet, queues) throw std::logic_error.
c10::intrusive_ptr<c10d::Store> signed_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                                             JobToken token);

}  // namespace penstock::internal
