#include "penstock/transport/nccl_interface.h"

#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): setenv is POSIX's

#include <cstdlib>
#include <string>

namespace penstock::internal::testing {
namespace {

constexpr const char* kVariable = "NCCL_SOCKET_IFNAME";

class NcclInterface : public ::testing::Test {
 protected:
  void SetUp() override { ::unsetenv(kVariable); }
  void TearDown() override { ::unsetenv(kVariable); }
};

TEST_F(NcclInterface, IsThatOfTheAddress) {
  EXPECT_EQ(nccl_interface("", "127.0.0.1"), "=lo");
  EXPECT_EQ(nccl_interface("eth7", "127.0.0.1"), "=eth7");
  // An address for documentation, which no interface has.
  EXPECT_EQ(nccl_interface("", "192.0.2.1"), "");
}

TEST_F(NcclInterface, IsSetForRanksOfOneMachine) {
  restrict_nccl("", "127.0.0.1");
  ASSERT_NE(std::getenv(kVariable), nullptr);
  EXPECT_EQ(std::string(std::getenv(kVariable)), "=lo");
}

TEST_F(NcclInterface, LeavesTheChoiceOfTheUserAlone) {
  ::setenv(kVariable, "ib0", 1);
  restrict_nccl("", "127.0.0.1");
  EXPECT_EQ(std::string(std::getenv(kVariable)), "ib0");
}

TEST_F(NcclInterface, IsNotSetForAnUnknownAddress) {
  restrict_nccl("", "192.0.2.1");
  EXPECT_EQ(std::getenv(kVariable), nullptr);
}

}  // namespace
}  // namespace penstock::internal::testing
