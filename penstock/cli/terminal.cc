#include "penstock/cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <mutex>
#include <streambuf>

namespace penstock::internal::cli {
namespace {

// Escape sequences that drawings use (draw/text.cc): black text on one of 256 colours, and reset. Others could hide
// text.
constexpr std::string_view kNoColour = "\x1b[0m";
constexpr std::string_view kColour = "\x1b[30;48;5;";
constexpr std::size_t kMostDigits = 3;

// Returns the length of a UTF-8 character by its first byte, or 0 if no character begins with this byte.
std::size_t length_by(unsigned first) {
  if (first < 0x80) return 1;
  if (first < 0xc2 || first >= 0xf5) return 0;
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

// Returns the length of the printable character that text begins with, or 0.
std::size_t printable_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = byte(0);
  const std::size_t length = length_by(first);
  bool is_good = length > 0 && (first >= 0x20 || first == '\n' || first == '\t') && first != 0x7f;
  for (std::size_t i = 1; i < length; ++i) is_good = is_good && (byte(i) & 0xc0U) == 0x80;
  // Rejects overlong forms, surrogates, code points above U+10FFFF, and the control characters U+0080 to U+009F.
  const unsigned second = byte(1);
  is_good = is_good && !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second >= 0xa0) &&
            !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second >= 0x90) &&
            !(first == 0xc2 && second < 0xa0);
  return is_good ? length : 0;
}

// Returns the length of the colour sequence that text begins with, or 0.
std::size_t colour_length(std::string_view text) {
  if (text.starts_with(kNoColour)) return kNoColour.size();
  if (!text.starts_with(kColour)) return 0;
  const std::size_t end = text.find_first_not_of("0123456789", kColour.size());
  const bool is_colour = end != std::string_view::npos && text[end] == 'm' && end <= kColour.size() + kMostDigits;
  return is_colour ? end + 1 : 0;
}

// Returns the length of an incomplete character or colour sequence at the end of text, or 0.
std::size_t unfinished_length(std::string_view text) {
  for (std::size_t length = std::min(text.size(), kColour.size() + kMostDigits); length > 0; --length) {
    const std::string_view end = text.substr(text.size() - length);
    const bool is_colour =
        kNoColour.starts_with(end) || kColour.starts_with(end) ||
        (end.starts_with(kColour) && end.find_first_not_of("0123456789", kColour.size()) == std::string_view::npos);
    if ((is_colour && end != kNoColour) || length_by(static_cast<unsigned char>(end.front())) > length) return length;
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = std::max(printable_length(text), colour_length(text));
    if (length > 0) {
      result += text.substr(0, length);
      text.remove_prefix(length);
      continue;
    }
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(text.front());
    result += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
    text.remove_prefix(1);
  }
  return result;
}

// Stream buffer that escapes what it forwards. A character may arrive in several writes, so an incomplete one is kept
// for the next write.
class PrintableOutput::Filter : public std::streambuf {
 public:
  explicit Filter(std::ostream& stream) : stream_(stream), under_(stream.rdbuf(this)) {}
  ~Filter() override {
    put(printable(waiting_));
    stream_.rdbuf(under_);
  }
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;

 protected:
  int_type overflow(int_type character) override {
    if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
    const char byte = traits_type::to_char_type(character);
    return xsputn(&byte, 1) == 1 ? character : traits_type::eof();
  }
  std::streamsize xsputn(const char* bytes, std::streamsize count) override {
    const std::lock_guard lock(mutex_);
    waiting_.append(bytes, static_cast<std::size_t>(count));
    const std::size_t ready = waiting_.size() - unfinished_length(waiting_);
    const bool is_written = put(printable(std::string_view(waiting_).substr(0, ready)));
    waiting_.erase(0, ready);
    return is_written ? count : 0;
  }
  int sync() override { return under_->pubsync(); }

 private:
  bool put(const std::string& text) {
    const auto size = static_cast<std::streamsize>(text.size());
    return under_->sputn(text.data(), size) == size;
  }

  std::ostream& stream_;
  std::streambuf* under_;
  // Guards waiting_: threads may print at once.
  std::mutex mutex_;
  std::string waiting_;
};

PrintableOutput::PrintableOutput()
    : out_(std::make_unique<Filter>(std::cout)), error_(std::make_unique<Filter>(std::cerr)) {}
PrintableOutput::~PrintableOutput() = default;

void erase_line() {
  constexpr std::string_view kErase = "\r\x1b[K";
  std::cout.flush();
  // Bypasses the filter, which would escape the sequence.
  static_cast<void>(!::write(STDOUT_FILENO, kErase.data(), kErase.size()));
}

}  // namespace penstock::internal::cli
