// Loading of plugins and of libtorch's libraries for accelerators. These tests need no accelerator.
#include "penstock/transport/device_backend.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): setenv is POSIX's

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "penstock/transport/device_plugin.h"
#include "penstock/transport/plugin_library.h"
#include "tests/tensor/folder.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

constexpr const char* kVariable = "PENSTOCK_TEST_PLUGIN";

// Returns the path of the plugin that plugin_stub.cc defines.
std::filesystem::path stub() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libpenstock_plugin_stub.so";
}

class LoadPlugin : public ::testing::Test {
 protected:
  void SetUp() override { ::unsetenv(kVariable); }
  void TearDown() override { ::unsetenv(kVariable); }

  // Returns a search in the test's directory.
  PluginSearch search(const std::string& name) {
    return {.name = name,
            .path_variable = kVariable,
            .directories = {folder_.path() / "first", folder_.path() / "second"},
            .install_hint = "build it"};
  }
  // Writes a file that is not a library.
  std::filesystem::path write_broken(const std::string& name) {
    std::filesystem::create_directories((folder_.path() / name).parent_path());
    std::ofstream(folder_.path() / name) << "not a library";
    return folder_.path() / name;
  }

  Folder folder_;
};

TEST_F(LoadPlugin, NamesThePlacesThatDoNotHaveIt) {
  const PluginLibrary plugin = load_plugin(search("libno_such_plugin.so"));
  EXPECT_EQ(plugin.handle, nullptr);
  EXPECT_EQ(plugin.reason, "there is no libno_such_plugin.so in " + (folder_.path() / "first").string() + ", " +
                               (folder_.path() / "second").string() +
                               ", or the search path of the dynamic linker.\n  Hint: build it, or set " + kVariable +
                               " to the path of the plugin.");
}

TEST_F(LoadPlugin, UsesTheFirstDirectoryThatHasIt) {
  std::filesystem::create_directories(folder_.path() / "second");
  std::filesystem::create_symlink(stub(), folder_.path() / "second" / "libstub.so");
  EXPECT_NE(load_plugin(search("libstub.so")).handle, nullptr);
  const std::string broken = write_broken("first/libstub.so");
  const std::string message = message_of<std::runtime_error>([&] { load_plugin(search("libstub.so")); });
  EXPECT_TRUE(message.starts_with(broken + " cannot be loaded: " + broken + ": ")) << message;
  EXPECT_NE(message.find(".\n  Hint: rebuild the plugin with the libtorch that this program uses"), std::string::npos)
      << message;
}

TEST_F(LoadPlugin, PrefersThePathInTheVariable) {
  write_broken("first/libstub.so");
  ::setenv(kVariable, stub().c_str(), 1);
  EXPECT_NE(load_plugin(search("libstub.so")).handle, nullptr);
}

TEST_F(LoadPlugin, ReportsAPathInTheVariableThatIsNoFile) {
  ::setenv(kVariable, "/nonexistent/libstub.so", 1);
  EXPECT_EQ(message_of<std::runtime_error>([&] { load_plugin(search("libstub.so")); }),
            std::string(kVariable) +
                " names no file: '/nonexistent/libstub.so'.\n  Hint: set it to the path of libstub.so, or unset it.");
}

TEST(PluginDirectories, BeginWithThatOfTheExecutable) {
  EXPECT_EQ(plugin_directories().front(), std::filesystem::read_symlink("/proc/self/exe").parent_path());
}

TEST(DeviceBackends, PassArgumentsAndErrorsOfThePlugin) {
  void* const library = load_library(stub(), RTLD_LOCAL, "");
  const DeviceBackendFactory create = device_backends_of(library, at::Device(at::kCUDA, 1)).create;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->add("key", 7);
  EXPECT_EQ(message_of<std::runtime_error>([&] { create(store, 2, 3, at::Device(at::kCUDA, 1)); }),
            "rank 2 of 3 on device 1, with 7 in the store");
  EXPECT_EQ(store.use_count(), 1U);
}

TEST(DeviceBackends, IdentifyADeviceAmongThoseOfAllMachines) {
  void* const library = load_library(stub(), RTLD_LOCAL, "");
  const auto id_of = [&](at::Device device) { return device_backends_of(library, device).device_id; };
  const std::string id = id_of(at::Device(at::kCUDA, 1));
  EXPECT_TRUE(id.ends_with("/cuda/slot 1")) << id;
  std::string machine;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), machine);
  EXPECT_TRUE(id.starts_with(machine)) << id;
  EXPECT_NE(id_of(at::Device(at::kCUDA, 2)), id);
  EXPECT_EQ(id_of(at::kCUDA), "");
}

TEST(DeviceBackends, ReportADeviceThatThePluginDoesNotHave) {
  void* const library = load_library(stub(), RTLD_LOCAL, "");
  EXPECT_EQ(message_of<std::runtime_error>([&] { device_backends_of(library, at::Device(at::kCUDA, 4)); }),
            "there is no device 4");
}

TEST(DeviceBackends, ReportALibraryThatIsNoPlugin) {
  void* const library = load_library("libc10.so", RTLD_LOCAL, "");
  const std::string message = message_of<std::runtime_error>([&] { device_backends_of(library, at::kCUDA); });
  EXPECT_TRUE(message.starts_with("the library is not a plugin of Penstock: ")) << message;
  EXPECT_NE(message.find("penstock_device_backend"), std::string::npos) << message;
}

TEST(DeviceBackends, ExplainATypeWithoutPlugin) {
  const DeviceBackends backends = device_backends(at::kXPU);
  EXPECT_FALSE(backends.create);
  EXPECT_EQ(backends.reason, "there is no plugin for xpu devices.\n  Hint: stage tensors in CPU memory.");
}

TEST(DeviceBackends, ExplainThatTheCpuHasNone) {
  const DeviceBackends backends = device_backends(at::kCPU);
  EXPECT_FALSE(backends.create);
  EXPECT_EQ(backends.reason,
            "the rank is on the CPU, whose tensors need no device backend.\n  Hint: name the rank's device.");
}

TEST(DeviceBackends, ExplainThatThereIsNoCuda) {
  const DeviceBackends backends = device_backends(at::kCUDA);
  if (at::hasCUDA()) GTEST_SKIP() << "there are GPUs";
  EXPECT_FALSE(backends.create);
  // The reason depends on the build of libtorch.
  EXPECT_NE(backends.reason.find("\n  Hint: "), std::string::npos) << backends.reason;
}

TEST(LoadAccelerator, DoesNothingWithoutALibrary) {
  const Folder folder;
  load_accelerator_from(folder.path());
}

TEST(LoadAccelerator, ReportsALibraryThatCannotBeLoaded) {
  const Folder folder;
  const std::string broken = folder.path() / "libtorch_xpu.so";
  std::ofstream(broken) << "not a library";
  const std::string message = message_of<std::runtime_error>([&] { load_accelerator_from(folder.path()); });
  EXPECT_TRUE(message.starts_with(broken + " cannot be loaded: " + broken + ": ")) << message;
  EXPECT_NE(message.find("`pip check`"), std::string::npos) << message;
}

}  // namespace
}  // namespace penstock::internal::testing
