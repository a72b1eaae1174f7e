// Reads input files, and writes results to standard output or, atomically, to a file.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>

namespace penstock::internal::cli {

// Calls write(stream) and prints the result if `path` is empty or "-". Otherwise writes a temporary file in the same
// directory, syncs it and renames it to `path`; on failure it is removed. Throws std::runtime_error, which names the
// file.
void write_output(const std::string& path, const std::function<void(std::ostream&)>& write);

// Throws std::runtime_error if `path` is a directory, or its parent directory does not exist. Called before long work,
// whose result could not be written otherwise.
void require_writable_path(const std::string& path);

// Returns the content of a file. Throws std::runtime_error, which names it.
std::string read_file(const std::string& path);

}  // namespace penstock::internal::cli
