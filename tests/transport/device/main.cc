#include <gtest/gtest.h>

#include "tests/transport/device/device_ranks.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new penstock::internal::testing::Simulation);
  return RUN_ALL_TESTS();
}
