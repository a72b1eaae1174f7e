// A process rank that trains until one of the ranks is killed or stopped at one of its actions. The exit codes of the
// others tell whether they detected it in time and with the right error. With signal 0, the test disconnects a rank and
// writes the time.
//
//   victim SIGNAL RANK STEP ACTION TIMEOUT_MS FILE SCHEDULE [staged|direct]
//
// With the last argument each process has a simulated device, and its tensors are sent in this way.
#include "tests/runtime/victim.h"

#include <ATen/ATen.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

struct Plan {
  int signal = 0;
  int rank = 0;
  int step = 0;
  int action = 0;
  std::chrono::milliseconds timeout = {};
  // File with the time of the signal, on the clock that all processes share.
  std::string file;
  std::string schedule;
  // Empty for tensors on the CPU.
  std::string carrier;
};

double now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

int judge(const Plan& plan, const std::string& what) {
  double then = 0;
  std::ifstream(plan.file) >> then;
  const double seconds = now() - then;
  const bool killed = plan.signal == SIGKILL;
  const std::string victim = "rank " + std::to_string(plan.rank);
  const bool names_it = killed ? what.find(": connection to " + victim + " lost\n") != std::string::npos
                               : what.find(victim + " within the deadline of ") != std::string::npos;
  // Between two steps there is no action to report.
  const bool between_steps = what.find(": ") < what.find(", ");
  if (!names_it || what.find("\n  " + victim + ": did not answer") == std::string::npos ||
      (!between_steps && what.find("<-- here") == std::string::npos)) {
    std::cerr << what << "\n";
    return kWrongWords;
  }
  const double most = killed ? 2.0 : std::chrono::duration<double>(plan.timeout).count() + 2.0;
  if (seconds <= most) return kNoticed;
  std::cerr << "after " << seconds << " s: " << what << "\n";
  return kTooLate;
}

int run(const Plan& plan) {
  const bool is_on_device = !plan.carrier.empty();
  if (is_on_device) sim::install({.devices = 1});
  const std::shared_ptr<Transport> transport = c10d_transport(
      rendezvous(), options_of(plan.carrier == "direct" ? DeviceCarrier::Direct : DeviceCarrier::Staged));
  const Schedule schedule = generate(plan.schedule, {.ranks = transport->ranks(), .microbatches = 4});
  const Model model =
      perceptron(schedule.stages(), [&](int) { return is_on_device ? sim_device(0) : at::Device(at::kCPU); });
  int step = 0;
  int action = 0;
  PipelineOptions options{.transport = transport, .loss = squared_error};
  options.timeout = plan.timeout;
  options.functions.before = [&](int rank, const Action&) {
    if (rank != plan.rank || step != plan.step || action++ != plan.action) return;
    std::ofstream(plan.file) << std::fixed << now();
    std::raise(plan.signal);
  };
  const auto own = schedule.placement().stages_of(transport->rank());
  Pipeline pipeline(model.build({own.begin(), own.end()}), schedule, options);
  try {
    for (; step < 1'000'000; ++step) pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  } catch (const PipelineError& error) {
    return judge(plan, error.what());
  }
  return kNothingHappened;
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 7 || words.size() > 8) return 2;
  try {
    return penstock::internal::testing::run({.signal = std::stoi(words[0]),
                                             .rank = std::stoi(words[1]),
                                             .step = std::stoi(words[2]),
                                             .action = std::stoi(words[3]),
                                             .timeout = std::chrono::milliseconds(std::stoi(words[4])),
                                             .file = words[5],
                                             .schedule = words[6],
                                             .carrier = words.size() > 7 ? words[7] : ""});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 3;
  }
}
