// Run directories: created, locked, and removed again if nothing was written.
#include "penstock/train/run_directory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;

TEST(RunDirectory, IsCreatedWithItsParentsAndRemovedWhileEmpty) {
  const Folder folder;
  {
    const RunDirectory directory(folder / "a/b/c/");
    EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
  }
  EXPECT_EQ(folder.files(), 0U);
  {
    const RunDirectory directory(folder / "a/b/c");
    folder.write("a/b/kept", "");
  }
  EXPECT_TRUE(fs::exists(folder / "a/b/kept"));
  EXPECT_FALSE(fs::exists(folder / "a/b/c"));
  {
    // A directory that existed before stays, even if it is empty.
    const RunDirectory directory(folder / "a/b");
  }
  EXPECT_TRUE(fs::exists(folder / "a/b"));
}

TEST(RunDirectory, BelongsToOneRunAtATime) {
  const Folder folder;
  const std::string path = folder / "run";
  std::optional<RunDirectory> first(std::in_place, path);
  for (int i = 0; i < 2; ++i) {
    expect_error<RunDirectoryError>([&] { const RunDirectory second(path); },
                                    path + ": another run writes to it: process " + std::to_string(::getpid()) +
                                        ".\n  Hint: wait until it ends, or choose another directory.");
  }
  first.reset();
  EXPECT_NO_THROW(const RunDirectory second(path));
}

// A process that was killed leaves the file, but not the lock.
TEST(RunDirectory, AcquiresALockFileThatNobodyHolds) {
  const Folder folder;
  folder.write(".penstock-lock", "1 elsewhere\n");
  {
    const RunDirectory directory(folder.path().string());
    expect_error<RunDirectoryError>([&] { const RunDirectory second(folder.path().string()); },
                                    folder.path().string() + ": another run writes to it: process " +
                                        std::to_string(::getpid()) +
                                        ".\n  Hint: wait until it ends, or choose another directory.");
  }
  EXPECT_EQ(folder.files(), 0U);
}

TEST(RunDirectory, NamesAPathThatCannotBeUsed) {
  const Folder folder;
  const std::string file = folder.write("file", "");
  expect_error<RunDirectoryError>([&] { const RunDirectory directory(file); },
                                  file + ": is not a directory.\n  Hint: choose another path, or remove the file.");
  expect_error<RunDirectoryError>([&] { const RunDirectory directory(file + "/a/b"); },
                                  file + "/a/b: could not be created: " + file +
                                      "/a: Not a directory.\n  Hint: choose a directory that can be written to.");
  expect_error<RunDirectoryError>([&] { const RunDirectory directory("/proc/none"); },
                                  "/proc/none: could not be created: /proc/none: No such file or directory.\n"
                                  "  Hint: choose a directory that can be written to.");
  expect_error<RunDirectoryError>([&] { const RunDirectory directory("/proc/self"); },
                                  "/proc/self: cannot be written to: No such file or directory.\n"
                                  "  Hint: choose a directory that can be written to.");
  expect_error<RunDirectoryError>([&] { const RunDirectory directory(""); }, ": names no directory.");
}

// The file size limit stands for a full disk.
TEST(RunDirectory, RefusesAFullDiskAndLeavesNothing) {
  const Folder folder;
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit nothing{.rlim_cur = 0, .rlim_max = before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &nothing);
  std::string message;
  try {
    const RunDirectory directory(folder / "a/b");
  } catch (const RunDirectoryError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, (folder / "a/b") +
                         ": cannot be written to: File too large.\n  Hint: choose a directory that can be written to.");
  EXPECT_EQ(folder.files(), 0U);
}

TEST(RunDirectory, ReportsTooLittleFreeSpace) {
  const Folder folder;
  const RunDirectory directory(folder / "run");
  directory.require_space(1, "one byte");
  try {
    directory.require_space(std::uintmax_t{1} << 62U, "4 checkpoints");
    ADD_FAILURE() << "no error";
  } catch (const RunDirectoryError& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with((folder / "run") + ": has ")) << message;
    EXPECT_TRUE(message.ends_with(
        " MB free, and 4 checkpoints take about 4611686018427.4 MB.\n  Hint: free some space, choose a directory on "
        "another disk, or keep fewer checkpoints."))
        << message;
  }
}

}  // namespace
}  // namespace penstock::internal::testing
