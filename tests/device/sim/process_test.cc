// Processes with devices of their own exchange tensors through the ordered backend, and find their errors by exit codes.
#include <ATen/ATen.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "tests/device/sim/ordered_backend.h"
#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

constexpr int kRanks = 2;

// The work of a rank's process. It uses the functions that programs find by name.
void run_rank(int rank, const std::string& store_path, bool races) {
  if (penstock_device_install() != 0) std::_Exit(1);
  const at::Device device(kDeviceType, static_cast<c10::DeviceIndex>(rank));
  const auto store = c10::make_intrusive<c10d::FileStore>(store_path, kRanks);
  const auto backend =
      c10::intrusive_ptr<c10d::Backend>::reclaim(penstock_device_backend(store.get(), rank, kRanks, device.index()));
  std::vector<at::Tensor> tensors{at::full({16}, 1.0 + rank, at::TensorOptions(device))};
  const auto work = rank == 0 ? backend->send(tensors, 1, 0) : backend->recv(tensors, 0, 0);
  if (!races) work->wait();
  const at::Tensor sum = tensors[0] + 1;
  backend->allreduce(tensors)->wait();
  const float found = (tensors[0].sum() + sum.sum()).item<float>();
  if (!races && found != 64) std::_Exit(2);
  std::exit(0);
}

// Starts this program as each rank, and returns the exit codes.
std::vector<int> exit_codes(bool races) {
  std::string folder = testing::TempDir() + "penstock_sim_XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return {};
  const std::string path = folder + "/store";
  std::vector<::pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::string> words{"/proc/self/exe", "--gtest_also_run_disabled_tests",
                                   "--gtest_filter=SimProcess.DISABLED_RunsARank"};
    std::vector<std::string> variables{"SIM_TEST_RANK=" + std::to_string(rank), "SIM_TEST_STORE=" + path};
    if (races) variables.emplace_back("SIM_TEST_RACES=1");
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    std::vector<char*> environment;
    for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
    for (std::string& variable : variables) environment.push_back(variable.data());
    environment.push_back(nullptr);
    ::pid_t child = 0;
    if (::posix_spawn(&child, words[0].c_str(), nullptr, nullptr, arguments.data(), environment.data()) != 0) return {};
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const ::pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  ::unlink(path.c_str());
  ::rmdir(folder.c_str());
  return codes;
}

// The processes of the other tests run this one.
TEST(SimProcess, DISABLED_RunsARank) {
  const char* const rank = std::getenv("SIM_TEST_RANK");
  if (rank == nullptr) GTEST_SKIP() << "only other tests start it";
  run_rank(std::stoi(rank), std::getenv("SIM_TEST_STORE"), std::getenv("SIM_TEST_RACES") != nullptr);
}

TEST(SimProcess, ExchangesTensorsWithOthers) {
  EXPECT_EQ(exit_codes(/*races=*/false), (std::vector<int>{0, 0}));
}

// Rank 1 uses what it receives without waiting.
TEST(SimProcess, ReportsRacesByItsExitCode) {
  EXPECT_EQ(exit_codes(/*races=*/true), (std::vector<int>{0, kExitRaces}));
}

}  // namespace
}  // namespace penstock::sim
