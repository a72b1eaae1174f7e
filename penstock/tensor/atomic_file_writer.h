// Replaces a file atomically: a reader of the target finds the old file or the new one, and never a part of either.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace penstock::internal {

// Writes a temporary file in the target's directory. commit() syncs it to the disk and renames it to the target's name;
// without commit() the destructor removes it, and the target stays as it was. One thread uses a writer at a time.
//
//   AtomicFileWriter file("manifest.json");
//   file.write(text.data(), text.size());
//   file.commit();
class AtomicFileWriter {
 public:
  // Names the target and has the system's message. Thrown by all functions.
  class Error : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
  };

  // Creates the temporary file.
  explicit AtomicFileWriter(const std::string& target);
  // Appends `size` bytes.
  void write(const void* data, std::size_t size);
  // Replaces the target. Called once, after the last write().
  void commit();
  ~AtomicFileWriter();
  AtomicFileWriter(const AtomicFileWriter&) = delete;
  AtomicFileWriter& operator=(const AtomicFileWriter&) = delete;

 private:
  [[noreturn]] void fail(const std::string& problem) const;

  std::string target_;
  std::string temporary_name_;
  int directory_ = -1;
  int file_ = -1;
  bool is_committed_ = false;
};

}  // namespace penstock::internal
