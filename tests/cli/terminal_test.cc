#include "penstock/cli/terminal.h"

#include <gtest/gtest.h>

#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal::cli {
namespace {

TEST(Printable, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(printable("plain\ttext\nof penstock, größer ≥ 𝄞"), "plain\ttext\nof penstock, größer ≥ 𝄞");
  EXPECT_EQ(printable("\x1b[2J\x1b]0;title\a\r\b"), "\\x1b[2J\\x1b]0;title\\x07\\x0d\\x08");
  // Bytes that are not UTF-8: a lone continuation, a longer form than needed, a surrogate, a control character of Latin
  // 1.
  EXPECT_EQ(printable("\x9b\xc0\xaf\xed\xa0\x80\xc2\x9b"), "\\x9b\\xc0\\xaf\\xed\\xa0\\x80\\xc2\\x9b");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
}

TEST(Printable, KeepsTheColoursOfDrawingsAlone) {
  EXPECT_EQ(printable("\x1b[30;48;5;114m0F0\x1b[0m"), "\x1b[30;48;5;114m0F0\x1b[0m");
  EXPECT_EQ(printable("\x1b[8mhidden"), "\\x1b[8mhidden");
  EXPECT_EQ(printable("\x1b[30;48;5;1141m"), "\\x1b[30;48;5;1141m");
}

// Replaces the buffers of standard output and standard error for as long as it lives.
class Captured {
 public:
  Captured() : out_under_(std::cout.rdbuf(out_.rdbuf())), error_under_(std::cerr.rdbuf(error_.rdbuf())) {}
  ~Captured() {
    std::cout.rdbuf(out_under_);
    std::cerr.rdbuf(error_under_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  std::string out() const { return out_.str(); }
  std::string error() const { return error_.str(); }

 private:
  std::ostringstream out_;
  std::ostringstream error_;
  std::streambuf* out_under_;
  std::streambuf* error_under_;
};

TEST(PrintableOutput, FiltersBothStreamsWhileItLives) {
  const Captured captured;
  {
    const PrintableOutput filter;
    std::cout << "\x1b[2J" << 7 << "\n";
    std::cerr << "name\r";
  }
  std::cout << "\x1b";
  EXPECT_EQ(captured.out(), "\\x1b[2J7\n\x1b");
  EXPECT_EQ(captured.error(), "name\\x0d");
}

// A character or a colour may come in several writes.
TEST(PrintableOutput, IsTheSameHoweverTextIsWritten) {
  const std::string text = "≥\x1b[30;48;5;9m𝄞\x1b[0m\xe2\x89\x1b[3\x1b[0";
  for (std::size_t first = 0; first <= text.size(); ++first) {
    for (std::size_t second = first; second <= text.size(); ++second) {
      const Captured captured;
      {
        const PrintableOutput filter;
        const std::string_view view = text;
        std::cout << view.substr(0, first) << view.substr(first, second - first) << view.substr(second);
      }
      EXPECT_EQ(captured.out(), printable(text)) << first << ", " << second;
    }
  }
}

}  // namespace
}  // namespace penstock::internal::cli
