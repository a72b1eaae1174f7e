// Checkpoints: written completely or not at all, and refused when they are damaged or do not fit.
#include "penstock/train/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <system_error>

#include "penstock/train/checkpoint_directory.h"
#include "penstock/train/checkpoint_writer.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    names.insert(entry.path().filename().string());
  return names;
}

const std::string kHint =
    "\n  Hint: an older checkpoint may be good: name it, or move this one away to resume from it.";

class Checkpoints : public ::testing::Test {
 protected:
  void write(std::int64_t step, int keep = 3, const std::string& run = "one") {
    const CheckpointWriter writer(path(), step);
    writer.begin();
    writer.write_part(0, {{"a", at::full({2, 2}, step)}}, {{"a.step", at::scalar_tensor(step, at::kLong)}});
    writer.write_part(1, {{"b", at::arange(3)}}, {});
    writer.finish({.step = step, .run = run, .model = "a model", .configuration = R"({"seed": 7})"}, 2, keep);
  }
  std::string path() const { return (folder.path() / "checkpoints").string(); }
  std::string file(const std::string& name) const { return path() + "/step-00000010/" + name; }

  const Folder folder;
};

TEST_F(Checkpoints, ReturnTheTensorsThatWereWritten) {
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
    expect_error<CheckpointError>([&] { checkpoint.weight("c"); }, path() + "/step-00000010: has no tensor 'c'.");
  }
  EXPECT_EQ(names_in(path() + "/step-00000010"),
            (std::set<std::string>{"manifest.json", "optimizer-0.safetensors", "optimizer-1.safetensors",
                                   "weights-0.safetensors", "weights-1.safetensors"}));
}

TEST_F(Checkpoints, KeepTheLastOnes) {
  for (const int step : {5, 10, 15, 20}) write(step, /*keep=*/2);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000015", "step-00000020"}));
  EXPECT_EQ(Checkpoint(path()).info().step, 20);
  // A checkpoint of the same step is replaced.
  write(20, 2);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000015", "step-00000020"}));
}

TEST_F(Checkpoints, NeverPruneTheOneThatWasJustWritten) {
  for (const int step : {15, 30, 31}) write(step);
  write(3, /*keep=*/1);
  EXPECT_EQ(names_in(path()),
            (std::set<std::string>{"step-00000003", "step-00000015", "step-00000030", "step-00000031"}));
  write(20, /*keep=*/2);
  EXPECT_EQ(names_in(path()),
            (std::set<std::string>{"step-00000015", "step-00000020", "step-00000030", "step-00000031"}));
}

TEST_F(Checkpoints, OfAnotherRunAreNeitherReplacedNorPruned) {
  for (const int step : {5, 10}) write(step, /*keep=*/3, "another");
  write(11, /*keep=*/1);
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000005", "step-00000010", "step-00000011"}));
  expect_error<CheckpointError>([&] { write(10); },
                                path() +
                                    "/step-00000010: is a checkpoint of another run, so it is not replaced.\n  Hint: "
                                    "choose another directory.");
  EXPECT_EQ(Checkpoint(path() + "/step-00000010").info().run, "another");
  expect_error<CheckpointError>(
      [&] { require_one_run(path()); },
      path() +
          ": has checkpoints of different runs: step-00000005 and step-00000011.\n  Hint: move "
          "those of one run to another directory; each can still be used by its path.");
  fs::remove_all(path() + "/step-00000011");
  EXPECT_NO_THROW(require_one_run(path()));
  // A damaged checkpoint belongs to no run.
  std::ofstream(path() + "/step-00000005/manifest.json") << "{";
  EXPECT_NO_THROW(require_one_run(path()));
  write(12, /*keep=*/1, "another");
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-00000005", "step-00000012"}));
  EXPECT_NE(new_run_id(), new_run_id());
  EXPECT_EQ(new_run_id().size(), 32U);
}

TEST_F(Checkpoints, AreRemovedTogetherWithLeftoversOfKilledRuns) {
  for (const int step : {5, 10}) write(step);
  fs::create_directory(path() + "/.removed-step-00000002");
  CheckpointWriter(path(), 20).begin();
  std::ofstream(path() + "/step-note") << "of somebody else";
  remove_checkpoints(path());
  EXPECT_EQ(names_in(path()), (std::set<std::string>{"step-note"}));
  EXPECT_FALSE(last_checkpoint(path()));
}

TEST_F(Checkpoints, AreFoundByTheirDirectory) {
  EXPECT_FALSE(last_checkpoint(path()));
  for (const int step : {5, 10}) write(step);
  EXPECT_EQ(last_checkpoint(path()), path() + "/step-00000010");
  EXPECT_FALSE(is_checkpoint(path()));
  EXPECT_TRUE(is_checkpoint(path() + "/step-00000010"));
}

// The writer maps each file to compute its checksum, which may fail.
TEST_F(Checkpoints, ThatCannotBeMappedAreAnError) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20U;
  const at::Tensor large = at::zeros({kBytes}, at::kByte);
  const CheckpointWriter writer(path(), 20);
  writer.begin();
  std::ifstream status("/proc/self/statm");
  rlim_t pages = 0;
  status >> pages;
  rlimit before{};
  ::getrlimit(RLIMIT_AS, &before);
  const rlimit little{.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + kBytes / 2,
                      .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_AS, &little);
  std::string message;
  try {
    writer.write_part(0, {{"large", large}}, {});
  } catch (const CheckpointError& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(message, path() + "/.unfinished-step-00000020/weights-0.safetensors: could not be mapped: " +
                         std::generic_category().message(ENOMEM) + ".");
  writer.discard();
  EXPECT_EQ(names_in(path()), std::set<std::string>{});
}

TEST_F(Checkpoints, WithASpecialFileAreRefused) {
  write(10);
  fs::remove(file("weights-1.safetensors"));
  ASSERT_EQ(::mkfifo(file("weights-1.safetensors").c_str(), 0600), 0);
  expect_error<CheckpointError>(
      [&] { Checkpoint{path()}; },
      file("weights-1.safetensors") + ": is not a regular file, and so cannot be mapped." + kHint);
}

TEST_F(Checkpoints, ThatWereNotFinishedDoNotCount) {
  EXPECT_FALSE(last_checkpoint(path()));
  write(5);
  const CheckpointWriter writer(path(), 10);
  writer.begin();
  writer.write_part(0, {{"a", at::ones({1})}}, {});
  EXPECT_EQ(Checkpoint(path()).info().step, 5);
  expect_error<CheckpointError>([&] { writer.finish({}, 2, 3); },
                                path() +
                                    "/.unfinished-step-00000010/part-1.json: is missing: a rank has not written its "
                                    "part.");
  // The next checkpoint removes it.
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
    EXPECT_NO_THROW(Checkpoint{path()});
  };
  const std::string& hint = kHint;
  damaged(
      "weights-0.safetensors", [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); },
      file("weights-0.safetensors") + ": is damaged: its checksum does not match." + hint);
  const auto size = fs::file_size(file("optimizer-0.safetensors"));
  damaged(
      "optimizer-0.safetensors", [](std::string& bytes) { bytes.pop_back(); },
      file("optimizer-0.safetensors") + ": has " + std::to_string(size - 1) + " bytes, and the manifest says " +
          std::to_string(size) + "." + hint);
  damaged(
      "manifest.json", [](std::string& bytes) { bytes.resize(20); },
      file("manifest.json") + ": is damaged: it is not JSON.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes = std::string(200000, '['); },
      file("manifest.json") + ": is damaged: it is not JSON.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes = R"({"format": "penstock checkpoint", "version": 9})"; },
      file("manifest.json") + ": has version 9, expected version 3.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes = "{}"; },
      file("manifest.json") + ": is not the manifest of a Penstock checkpoint.");
  damaged(
      "manifest.json", [](std::string& bytes) { bytes.replace(bytes.find("10"), 2, "11"); },
      file("manifest.json") + ": is damaged: its checksum does not match." + hint);
  fs::remove(file("weights-1.safetensors"));
  expect_error<CheckpointError>(
      [&] { Checkpoint{path()}; },
      file("weights-1.safetensors") + ": could not be opened: No such file or directory." + hint);
}

// Another program may have written the manifest, with a correct checksum.
TEST_F(Checkpoints, WithInvalidValuesAreRefused) {
  write(10);
  std::ifstream in(file("manifest.json"));
  const auto good = nlohmann::json::parse(in);
  const auto refused = [&](const std::function<void(nlohmann::json&)>& change, const std::string& message) {
    nlohmann::json manifest = good;
    change(manifest);
    manifest.erase("crc32");
    const std::string text = manifest.dump();
    manifest["crc32"] = crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size());
    std::ofstream(file("manifest.json"), std::ios::trunc) << manifest;
    expect_error<CheckpointError>([&] { Checkpoint{path()}; }, file("manifest.json") + message + kHint);
  };
  const std::string expected = ", expected a non-negative integer.";
  for (const char* step : {"-5", "3.7", "18446744073709551615", "1e+300", "\"10\""}) {
    SCOPED_TRACE(step);
    refused([&](nlohmann::json& manifest) { manifest["step"] = nlohmann::json::parse(step); },
            std::string(": has the step ") + step + expected);
  }
  for (const std::string& name : {std::string("../x"), std::string(".."), std::string(), std::string("a\0b", 3)}) {
    refused([&](nlohmann::json& manifest) { manifest["files"][0]["name"] = name; },
            ": lists a file outside the checkpoint, " + nlohmann::json(name).dump() + ".");
  }
  refused([&](nlohmann::json& manifest) { manifest["files"].push_back(manifest["files"][0]); },
          ": lists the file \"weights-0.safetensors\" twice.");
  refused([&](nlohmann::json& manifest) { manifest["files"][0]["kind"] = "program"; },
          ": lists \"weights-0.safetensors\" with the unknown kind \"program\".");
  refused([&](nlohmann::json& manifest) { manifest["files"].erase(1); },
          ": does not list the file \"" + good["files"][1]["name"].get<std::string>() + "\", which exists.");
  refused([&](nlohmann::json& manifest) { manifest["files"][0]["bytes"] = -1; },
          ": has no size and checksum of \"weights-0.safetensors\".");
  fs::remove(file("manifest.json"));
  ASSERT_EQ(::mkfifo(file("manifest.json").c_str(), 0600), 0);
  expect_error<CheckpointError>([&] { Checkpoint{path() + "/step-00000010"}; },
                                file("manifest.json") + ": is not a regular file, and so cannot be mapped.");
}

TEST_F(Checkpoints, ThatDoNotExistAreNamed) {
  expect_error<CheckpointError>([&] { Checkpoint{path()}; }, path() + ": there is no such checkpoint.");
  fs::create_directories(path());
  expect_error<CheckpointError>([&] { Checkpoint{path()}; },
                                path() + ": has no checkpoint: neither manifest.json nor a directory step-N with one.");
}

TEST_F(Checkpoints, OfAnotherModelAreRefused) {
  write(10);
  const Checkpoint checkpoint(path());
  EXPECT_NO_THROW(checkpoint.require_model({.description = "a model"}));
  EXPECT_NO_THROW(checkpoint.require_model(
      {.description = "a model", .names = {"a", "b"}, .needed = {{"a", at::empty({2, 2}, at::kLong)}}}));
  const std::string beginning = path() + "/step-00000010: belongs to another model.";
  expect_error<CheckpointError>([&] { checkpoint.require_model({.description = "another"}); },
                                beginning + "\n  Found:    a model\n  Expected: another");
  expect_error<CheckpointError>(
      [&] {
        checkpoint.require_model({.description = "a model",
                                  .names = {"a", "c"},
                                  .needed = {{"a", at::empty({2, 3}, at::kLong)}, {"c", at::empty({1})}}});
      },
      beginning +
          "\n  a: [2, 2] in the checkpoint, [2, 3] in this model"
          "\n  c: only in this model"
          "\n  b: only in the checkpoint");
  expect_error<CheckpointError>(
      [&] { checkpoint.require_model({.description = "a model", .needed = {{"a", at::empty({2, 2})}}}); },
      beginning + "\n  a: int64 in the checkpoint, float32 in this model");
}

TEST_F(Checkpoints, HaveOptimizerStateThatFitsTheParameters) {
  const CheckpointWriter writer(path(), 10);
  writer.begin();
  writer.write_part(0, {{"a", at::ones({2})}, {"b", at::ones({2})}},
                    {{"a.exp_avg", at::ones({3})},
                     {"a.step", at::scalar_tensor(1.5)},
                     {"b.exp_avg", at::ones({2}, at::kInt)},
                     {"b.step", at::scalar_tensor(1, at::kLong)}});
  writer.finish({.step = 10, .model = "a model"}, 1, 1);
  expect_error<CheckpointError>(
      [&] {
        Checkpoint(path()).require_model(
            {.description = "a model", .needed = {{"a", at::ones({2})}, {"b", at::ones({2})}}});
      },
      path() +
          "/step-00000010: belongs to another model."
          "\n  a.exp_avg: [3] in the checkpoint, [2] in this model"
          "\n  a.step: float32 in the checkpoint, int64 in this model"
          "\n  b.exp_avg: int32 in the checkpoint, float32 in this model");
}

TEST_F(Checkpoints, ListDifferencesInTenLines) {
  write(10);
  const Checkpoint checkpoint(path());
  for (const std::string description : {"a model", "another"}) {
    ModelTensors model{.description = description};
    for (char name = 'c'; name < 'c' + 20; ++name) model.needed[std::string(1, name)] = at::empty({1});
    try {
      checkpoint.require_model(model);
      ADD_FAILURE() << "no error";
    } catch (const CheckpointError& error) {
      const std::string message = error.what();
      EXPECT_EQ(std::ranges::count(message, '\n'), 9) << message;
      EXPECT_TRUE(message.ends_with(description == "a model" ? "\n  … and 12 more" : "\n  … and 14 more")) << message;
    }
  }
}

// The file size limit stands for a full disk.
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
}  // namespace penstock::internal::testing
