#include "penstock/transport/job_token.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

std::string hexadecimal(std::span<const unsigned char> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text.push_back(kDigits[byte >> 4U]);
    text.push_back(kDigits[byte & 15U]);
  }
  return text;
}

using Bytes = std::vector<std::uint8_t>;

class SignedStore final : public c10d::PrefixStore {
 public:
  SignedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, JobToken token)
      : PrefixStore(prefix, std::move(store)), token_(std::move(token)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<SignedStore>(prefix_, store_->clone(), token_);
  }

  using Store::set;
  void set(const std::string& key, const Bytes& value) override { PrefixStore::set(key, with_signature(key, value)); }

  // An empty expected value stands for a key that is not set, as in c10d.
  using Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return verified(key, PrefixStore::compareSet(key, expected.empty() ? expected : with_signature(key, expected),
                                                 with_signature(key, desired)));
  }

  Bytes get(const std::string& key) override { return verified(key, PrefixStore::get(key)); }

  // The calls below are not signed. Callers that query hasExtendedApi() use set and get instead.
  bool hasExtendedApi() const override { return false; }
  void append(const std::string&, const Bytes&) override { refuse("append"); }
  std::vector<Bytes> multiGet(const std::vector<std::string>&) override { refuse("multiGet"); }
  void multiSet(const std::vector<std::string>&, const std::vector<Bytes>&) override { refuse("multiSet"); }
  void queuePush(const std::string&, const Bytes&) override { refuse("queuePush"); }
  Bytes queuePop(const std::string&, bool) override { refuse("queuePop"); }

 private:
  [[noreturn]] static void refuse(const char* call) {
    throw std::logic_error(concat(call, " cannot be signed, so a signed store does not support it."));
  }
  std::string signature_of(const std::string& key, const Bytes& value) const {
    return token_.sign(std::array{key, std::string(value.begin(), value.end())});
  }
  Bytes with_signature(const std::string& key, const Bytes& value) const {
    const std::string signature = signature_of(key, value);
    Bytes bytes(signature.begin(), signature.end());
    bytes.insert(bytes.end(), value.begin(), value.end());
    return bytes;
  }
  Bytes verified(const std::string& key, const Bytes& bytes) const {
    constexpr auto kSize = static_cast<std::ptrdiff_t>(JobToken::kSignatureSize);
    if (std::ssize(bytes) >= kSize) {
      Bytes value(bytes.begin() + kSize, bytes.end());
      const std::string signature(bytes.begin(), bytes.begin() + kSize);
      if (token_.verifies(std::array{key, std::string(value.begin(), value.end())}, signature)) return value;
    }
    throw UnsignedValueError(concat("'", key, "' in the store was not written by a rank of this job."));
  }

  JobToken token_;
};

}  // namespace

JobToken JobToken::random() {
  std::array<unsigned char, 32> bytes{};
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    throw std::runtime_error("a job token cannot be created: the system provides no random numbers.");
  }
  return JobToken(hexadecimal(bytes));
}

std::string JobToken::sign(std::span<const std::string> texts) const {
  const std::string joined = join_texts(texts);
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned size = 0;
  const unsigned char* const signature =
      HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
           reinterpret_cast<const unsigned char*>(joined.data()), joined.size(), bytes.data(), &size);
  if (signature == nullptr) throw std::runtime_error("OpenSSL could not compute a signature (HMAC-SHA-256).");
  return hexadecimal(std::span(bytes).first(size));
}

bool JobToken::verifies(std::span<const std::string> texts, std::string_view signature) const {
  const std::string expected = sign(texts);
  return signature.size() == expected.size() && CRYPTO_memcmp(signature.data(), expected.data(), expected.size()) == 0;
}

std::string join_texts(std::span<const std::string> texts) {
  std::string joined;
  for (const std::string& text : texts) joined += concat(text.size(), ':', text);
  return joined;
}

std::vector<std::string> split_texts(std::string_view joined) {
  std::vector<std::string> texts;
  while (!joined.empty()) {
    std::size_t size = 0;
    const auto [end, error] = std::from_chars(joined.data(), joined.data() + joined.size(), size);
    const auto digits = static_cast<std::size_t>(end - joined.data());
    if (error != std::errc() || digits >= joined.size() || *end != ':' || size > joined.size() - digits - 1) {
      throw std::invalid_argument("expected texts that are each preceded by their length.");
    }
    texts.emplace_back(joined.substr(digits + 1, size));
    joined.remove_prefix(digits + 1 + size);
  }
  return texts;
}

c10::intrusive_ptr<c10d::Store> signed_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                                             JobToken token) {
  return c10::make_intrusive<SignedStore>(prefix, std::move(store), std::move(token));
}

}  // namespace penstock::internal
