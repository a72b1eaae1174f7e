// Checkpoints: written whole or not at all, and refused when something is wrong with them.
#include "penstock/train/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

class Checkpoints : public ::testing::Test {
 protected:
  void write(std::int64_t step, int keep = 3) {
    const CheckpointWriter writer(path(), step);
    writer.begin();
    writer.write_part(0, {{"a", at::full({2, 2}, step)}}, {{"a.step", at::scalar_tensor(step, at::kLong)}});
    writer.write_part(1, {{"b", at::arange(3)}}, {});
    writer.finish({.step = step, .model = "a model", .configuration = R"({"seed": 7})"}, 2, keep);
  }
  std::string path() const { return (folder.path() / "checkpoints").string(); }
  std::string file(const std::string& name) const { return path() + "/step-00000010/" + name; }

  const Folder folder;
};

TEST_F(Checkpoints, GiveBackWhatWasWritten) {
  write(10);
  for (const std::string& place : {path(), path() + "/step-00000010"}) {
    const Checkpoint checkpoint(place);
    EXPECT_EQ(checkpoint.path(), path() + "/step-00000010");
    EXPECT_EQ(checkpoint.info().step, 10);
    EXPECT_EQ(json::parse(checkpoint.info().configuration), (json{{"seed", 7}}));
    EXPECT_TRUE(same(at::full({2, 2}, 10), checkpoint.weight("a")));
    EXPECT_TRUE(same(at::arange(3), checkpoint.weight("b")));
    EXPECT_EQ(checkpoint.optimizer_state("a.step")->item<std::int64_t>(), 10);
    EXPECT_FALSE(checkpoint.optimizer_state("b.step"));
    expect_error<CheckpointError>([&] { checkpoint.weight("c"); }, path() + "/step-00000010: has no 'c'.");
  }
  EXPECT_EQ(names_in(path() + "/step-00000010"),
            (std::set<std::string>{"manifest.json", "optimizer-0.safetensors", "optimizer-1.safetensors",
                                   "weights-0.safetensors", "weights-1.safetensors"}));
}

TEST_F(Checkpoints, KeepTheLastOnes) {
  for (const int step : {5, 10, 15, 20}) write(step, /*keep=*/2);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000015", "step-00000020"}));
  EXPECT_EQ(Checkpoint(path()).info().step, 20);
  // One of the same step gives way.
  write(20, 2);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000015", "step-00000020"}));
}

TEST_F(Checkpoints, ThatWereNotFinishedAreNone) {
  EXPECT_FALSE(has_checkpoint(path()));
  write(5);
  const CheckpointWriter writer(path(), 10);
  writer.begin();
  writer.write_part(0, {{"a", at::ones({1})}}, {});
  EXPECT_EQ(Checkpoint(path()).info().step, 5);
  expect_error<CheckpointError>([&] { writer.finish({}, 2, 3); },
                                path() +
                                    "/.unfinished-step-00000010/part-1.json: is missing: a rank has not written its "
                                    "part.");
  // The next one sweeps it away.
  write(15);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000005", "step-00000015"}));
}

TEST_F(Checkpoints, ThatAreDamagedAreRefused) {
  write(10);
  const auto damaged = [&](const std::string& name, const std::function<void(std::string&)>& damage,
                           const std::string& message) {
    std::ifstream in(file(name), std::ios::binary);
    const std::string good{std::istreambuf_iterator<char>(in), {}};
    std::string bad = good;
    damage(bad);
    std::ofstream(file(name), std::ios::binary | std::ios::trunc) << bad;
    expect_error<CheckpointError>([&] { Checkpoint{path()}; }, message);
    std::ofstream(file(name), std::ios::binary | std::ios::trunc) << good;
    EXPECT_NO_THROW(Checkpoint(path()));
  };
  const std::string hint = "\n  Hint: an older checkpoint may be good: name its folder.";
  damaged(
      "weights-0.safetensors", [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); },
      file("weights-0.safetensors") + ": is damaged: its bytes do not have their checksum." + hint);
  const auto size = fs::file_size(file("optimizer-0.safetensors"));
  damaged(
      "optimizer-0.safetensors", [](std::string& bytes) { bytes.pop_back(); },
      file("optimizer-0.safetensors") + ": has " + std::to_string(size - 1) + " bytes, and the manifest says " +
          std::to_string(size) + "." + hint);
  damaged(
      "manifest.json", [](std::string& bytes) { bytes.resize(20); },
      file("manifest.json") + ": is damaged: it is not JSON.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes = R"({"format": "penstock checkpoint", "version": 9})"; },
      file("manifest.json") + ": is of version 9; version 1 is what can be read.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes = "{}"; },
      file("manifest.json") + ": is not that of a Penstock checkpoint.");
  fs::remove(file("weights-1.safetensors"));
  expect_error<CheckpointError>([&] { Checkpoint{path()}; },
                                file("weights-1.safetensors") + ": cannot be read: No such file or directory." + hint);
}

TEST_F(Checkpoints, ThatAreNotThereAreNamed) {
  expect_error<CheckpointError>([&] { Checkpoint{path()}; }, path() + ": there is no such checkpoint.");
  fs::create_directories(path());
  expect_error<CheckpointError>(
      [&] { Checkpoint{path()}; },
      path() + ": has no checkpoint in it: neither manifest.json nor a folder step-N with one.");
}

TEST_F(Checkpoints, AreOfOneModel) {
  write(10);
  const Checkpoint checkpoint(path());
  EXPECT_NO_THROW(checkpoint.require_model("a model"));
  expect_error<CheckpointError>(
      [&] { checkpoint.require_model("another"); },
      path() + "/step-00000010: is of another model.\n  It is of:  a model\n  Wanted is: another");
}

// As on a disk that is full.
TEST_F(Checkpoints, ThatCannotBeWrittenLeaveTheOlderOnes) {
  write(10);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &little);
  const CheckpointWriter writer(path(), 20);
  writer.begin();
  try {
    writer.write_part(0, {{"a", at::ones({10'000})}}, {});
    ADD_FAILURE() << "no error";
  } catch (const CheckpointError& error) {
    EXPECT_EQ(std::string(error.what()),
              path() + "/.unfinished-step-00000020/weights-0.safetensors: could not be written: File too large.");
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(names_in(path() + "/.unfinished-step-00000020"), std::set<std::string>{});
  EXPECT_EQ(Checkpoint(path()).info().step, 10);
  write(30);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000010", "step-00000030"}));
}

}  // namespace
}  // namespace penstock::testing
