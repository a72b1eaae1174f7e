// Devices by name, in a process without an accelerator.
#include "penstock/device/device_list.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

constexpr const char* kForms = "\n  Hint: devices are cpu, cuda, cuda:0,1, xpu and sim.";

TEST(DeviceList, ReadsTypesAndIndices) {
  EXPECT_TRUE(parse_devices("cpu").is_cpu());
  EXPECT_EQ(parse_devices("cpu").of(3), at::Device(at::kCPU));
  const DeviceList all = parse_devices("cuda");
  EXPECT_EQ(all.type(), at::kCUDA);
  EXPECT_TRUE(all.devices().empty());
  EXPECT_EQ(parse_devices("xpu:7").devices(), std::vector{at::Device(at::kXPU, 7)});
  EXPECT_EQ(parse_devices("sim:0,2").text(), "sim:0,2");
  EXPECT_EQ(parse_devices("sim:0,2").type(), at::kPrivateUse1);
}

TEST(DeviceList, DealsDevicesToRanksInTurn) {
  const DeviceList devices = parse_devices("cuda:3,1");
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(devices.of(rank), at::Device(at::kCUDA, rank % 2 == 0 ? 3 : 1)) << rank;
}

TEST(DeviceList, NamesWhatIsNotADevice) {
  const auto refusal = [](const std::string& text) { return message_of<DeviceError>([&] { parse_devices(text); }); };
  EXPECT_EQ(refusal("gpu"), std::string("there is no device type 'gpu'.") + kForms);
  EXPECT_EQ(refusal(""), std::string("there is no device type ''.") + kForms);
  EXPECT_EQ(refusal("cpu:0"), std::string("the CPU has no index; found 'cpu:0'.") + kForms);
  EXPECT_EQ(refusal("cuda:"), std::string("'cuda:': '' is not the index of a device.") + kForms);
  EXPECT_EQ(refusal("cuda:0,"), std::string("'cuda:0,': '' is not the index of a device.") + kForms);
  EXPECT_EQ(refusal("cuda:-1"), std::string("'cuda:-1': '-1' is not the index of a device.") + kForms);
  EXPECT_EQ(refusal("cuda:200"), std::string("'cuda:200': '200' is not the index of a device.") + kForms);
  EXPECT_EQ(refusal("sim:1x"), std::string("'sim:1x': '1x' is not the index of a device.") + kForms);
  EXPECT_EQ(refusal("sim:1,1"),
            "'sim:1,1' names device 1 twice.\n  Hint: ranks share devices when there are more ranks than devices.");
}

TEST(DeviceList, RefusesATypeThatLibtorchDoesNotSupport) {
  EXPECT_TRUE(parse_devices("cpu").complete().is_cpu());
  EXPECT_EQ(
      message_of<DeviceError>([] { parse_devices("sim:0").complete(); }),
      "this build of libtorch does not support sim devices.\n  Hint: install a build of torch for sim and add its "
      "directory torch/lib to LD_LIBRARY_PATH, or use the CPU.");
}

}  // namespace
}  // namespace penstock::internal::testing
