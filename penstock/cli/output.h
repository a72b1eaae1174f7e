// Where a subcommand's result goes: standard output, or a file that is written whole or not at all.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>

namespace penstock::cli {

// Calls write(stream) with standard output when `path` is empty or "-". Otherwise writes a file beside `path` and renames
// it once all is on the disk; on failure it is removed. Throws std::runtime_error, which names the file.
void write_output(const std::string& path, const std::function<void(std::ostream&)>& write);

// Throws std::runtime_error unless the folder is there that a file is to be written to: before the work, and not after it.
void require_folder(const std::string& path);

// The content of a file. Throws std::runtime_error, which names it.
std::string read_file(const std::string& path);

}  // namespace penstock::cli
