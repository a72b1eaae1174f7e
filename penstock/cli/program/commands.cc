// Entry point of the library that has the commands that need libtorch, and what these commands share.
#include "penstock/cli/program/commands.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <utility>

#include "penstock/cli/command.h"
#include "penstock/cli/limits.h"

namespace {

struct Group {
  const char* name;
  std::initializer_list<const char*> options;
};

// Assigns options to the groups that --help shows. An option that is not listed stays in the first group.
void group_options(CLI::App& command) {
  static const std::initializer_list<Group> kGroups{
      {"Model", {"--weights", "--layers", "--width", "--heads", "--dropout", "--dtype", "--allow-operator"}},
      {"Data", {"--data", "--inputs", "--loss", "--ignore-index", "--shuffle", "--digits", "--rows", "--length"}},
      {"Cut", {"--at", "--stages"}},
      {"Schedule", {"--schedule", "--csv", "--ranks", "--microbatches", "--data-parallel", "--shard"}},
      {"Run",
       {"--steps", "--accumulate", "--transport", "--threads", "--seed", "--timeout", "--eval-every", "--on-nonfinite",
        "--max-skipped", "--memory-limit", "--time-limit", "--dry-run", "--config", "--eval", "--tolerance"}},
      {"Optimizer",
       {"--optimizer", "--learning-rate", "--lr-schedule", "--warmup", "--min-lr", "--momentum", "--beta1", "--beta2",
        "--weight-decay", "--clip"}},
      {"Checkpoints", {"--checkpoint", "--checkpoint-every", "--keep", "--resume", "--overwrite"}},
      {"Output", {"--output", "--log-every", "--json", "--format", "--dump", "--pt2", "--model"}},
  };
  for (const Group& group : kGroups) {
    for (const char* name : group.options) {
      if (CLI::Option* const option = command.get_option_no_throw(name)) option->group(group.name);
    }
  }
}

}  // namespace

void penstock::cli::on_call(CLI::App& command, std::function<void()> run) {
  group_options(command);
  command.callback([run = std::move(run)] {
    // libtorch's warnings, such as for a host without a name, are of no use to users of the command.
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
    prepare_process();
    try {
      run();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  });
}

extern "C" __attribute__((visibility("default"))) void penstock_add_program_command(CLI::App* command, int* exit) {
  const std::string& name = command->get_name();
  if (name == "split") penstock::cli::add_split(*command, *exit);
  if (name == "check") penstock::cli::add_check(*command, *exit);
  if (name == "run") penstock::cli::add_run(*command, *exit);
  if (name == "eval") penstock::cli::add_eval(*command, *exit);
  if (name == "export") penstock::cli::add_export(*command, *exit);
  if (name == "train") penstock::cli::add_train(*command, *exit);
  if (name == "generate") penstock::cli::add_generate(*command, *exit);
  if (name == "launch") penstock::cli::add_launch(*command, *exit);
}
