// Keeps what the command prints harmless to a terminal: names in models, files and messages come from anybody, and may have
// control sequences in them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace penstock::cli {

// Returns text for a terminal: bytes that are not UTF-8, and control characters other than new lines and tabs, become
// escapes such as "\x9b". The colours of drawings stay.
std::string printable(std::string_view text);

// Filters standard output and standard error through printable() while it lives.
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

// Erases the line of standard output that the cursor is in.
void erase_line();

}  // namespace penstock::cli
