#include "penstock/program/archive.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "penstock/program/error.h"

namespace penstock {
namespace {

// A file in memory, for as long as the archive is open.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) throw ProgramError(path + ": " + reason() + ".");
    struct ::stat status = {};
    const bool known = ::fstat(file, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
      const std::string why = known ? "is not a regular file" : reason();
      ::close(file);
      throw ProgramError(path + ": " + why + ".");
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) memory_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const bool mapped = memory_ != MAP_FAILED;
    const std::string why = mapped ? "" : reason();
    ::close(file);
    if (!mapped) throw ProgramError(path + ": " + why + ".");
  }
  ~Mapping() {
    if (memory_ != nullptr) ::munmap(memory_, size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(memory_), size_}; }

 private:
  static std::string reason() { return std::generic_category().message(errno); }

  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

class ReadMemory final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit ReadMemory(std::string_view bytes) : bytes_(bytes) {}

  std::size_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t position, void* to, std::size_t count, const char* /*what*/) const override {
    if (position >= bytes_.size()) return 0;
    const std::size_t there = std::min(count, bytes_.size() - static_cast<std::size_t>(position));
    std::memcpy(to, bytes_.data() + position, there);
    return there;
  }

 private:
  std::string_view bytes_;
};

// libtorch's messages go on with where in its own sources they were thrown.
std::string first_line(const std::exception& error) {
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

struct Archive::Content {
  std::string name;
  std::unique_ptr<Mapping> mapping;
  std::string_view bytes;
  std::vector<std::string> records;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader;
};

Archive::Archive(const std::string& path) : content_(std::make_unique<Content>()) {
  content_->name = path;
  content_->mapping = std::make_unique<Mapping>(path);
  content_->bytes = content_->mapping->bytes();
  open();
}

Archive::Archive(std::string_view bytes, std::string name) : content_(std::make_unique<Content>()) {
  content_->name = std::move(name);
  content_->bytes = bytes;
  open();
}

Archive::~Archive() = default;
Archive::Archive(Archive&&) noexcept = default;
Archive& Archive::operator=(Archive&&) noexcept = default;

void Archive::open() {
  const auto refuse = [&](const std::string& why) {
    throw ProgramError(content_->name + ": " + why + "\n  Hint: a .pt2 is what torch.export.save writes.");
  };
  if (!content_->bytes.starts_with("PK")) refuse("is not a .pt2: it is not a zip archive.");
  try {
    content_->reader =
        std::make_unique<caffe2::serialize::PyTorchStreamReader>(std::make_shared<ReadMemory>(content_->bytes));
    content_->records = content_->reader->getAllRecords();
  } catch (const std::exception& error) {
    refuse("is not a .pt2, or is damaged: " + first_line(error));
  }
  for (const std::string& record : content_->records) {
    const bool leaves = record.starts_with('/') || record == ".." || record.starts_with("../") ||
                        record.find("/../") != std::string::npos || record.ends_with("/..");
    if (leaves) refuse("its record '" + record + "' lies outside of the archive.");
  }
}

const std::string& Archive::name() const {
  return content_->name;
}

const std::vector<std::string>& Archive::records() const {
  return content_->records;
}

bool Archive::contains(std::string_view record) const {
  return std::find(content_->records.begin(), content_->records.end(), record) != content_->records.end();
}

std::size_t Archive::size_of(const std::string& record) const {
  if (!contains(record)) throw ProgramError(content_->name + ": has no record " + record + ".");
  std::size_t size = 0;
  try {
    size = content_->reader->getRecordSize(record);
  } catch (const std::exception& error) {
    throw ProgramError(content_->name + ": " + record + " cannot be read: " + first_line(error));
  }
  // Records are stored as they are.
  if (size > content_->bytes.size()) {
    throw ProgramError(content_->name + ": " + record + " claims " + std::to_string(size) +
                       " bytes, and the whole archive has " + std::to_string(content_->bytes.size()) +
                       "; it is damaged, or compressed, which torch.export.save does not do.");
  }
  return size;
}

std::string Archive::text(const std::string& record) const {
  const at::Tensor content = bytes(record);
  return {static_cast<const char*>(content.const_data_ptr()), static_cast<std::size_t>(content.numel())};
}

at::Tensor Archive::bytes(const std::string& record) const {
  const std::size_t size = size_of(record);
  at::Tensor result = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  if (size == 0) return result;
  try {
    content_->reader->getRecord(record, result.mutable_data_ptr(), size);
  } catch (const std::exception& error) {
    throw ProgramError(content_->name + ": " + record + " cannot be read: " + first_line(error));
  }
  return result;
}

}  // namespace penstock
