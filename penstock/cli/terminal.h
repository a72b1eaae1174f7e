// Escapes control sequences in what the command prints: names in models, files and messages are untrusted.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace penstock::internal::cli {

// Returns text that is safe for a terminal: bytes that are not UTF-8, and control characters other than newline and
// tab, are replaced by escapes such as "\x9b". Colour sequences of drawings stay.
std::string printable(std::string_view text);

// Filters standard output and standard error through printable() for as long as it lives. Any thread may print.
class PrintableOutput {
 public:
  PrintableOutput();
  ~PrintableOutput();
  PrintableOutput(const PrintableOutput&) = delete;
  PrintableOutput& operator=(const PrintableOutput&) = delete;

 private:
  class Filter;
  std::unique_ptr<Filter> out_;
  std::unique_ptr<Filter> error_;
};

// Erases the current line of the terminal on standard output.
void erase_line();

}  // namespace penstock::internal::cli
