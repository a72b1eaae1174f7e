// Entry point of the library that has the commands that need libtorch, and what these commands share.
#include "penstock/cli/program/commands.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/cli/command.h"
#include "penstock/cli/limits.h"

namespace {

struct Group {
  const char* name;
  std::vector<const char*> options;
};

// Returns the groups in the order in which --help shows them. An option that is not listed stays in the first one,
// "Options".
const std::vector<Group>& groups() {
  static const std::vector<Group> kGroups{
      {"Model",
       {"--weights", "--init-std", "--layers", "--width", "--heads", "--dropout", "--dtype", "--model",
        "--allow-operator"}},
      {"Data", {"--data", "--inputs", "--loss", "--ignore-index", "--shuffle", "--digits", "--rows", "--length"}},
      {"Cut", {"--at", "--stages"}},
      {"Schedule",
       {"--schedule", "--csv", "--ranks", "--microbatches", "--data-parallel", "--shard", "--recompute", "--memory"}},
      {"Run",
       {"--steps", "--accumulate", "--transport", "--device", "--device-transport", "--threads", "--seed", "--timeout",
        "--eval-every", "--on-nonfinite", "--max-skipped", "--memory-limit", "--time-limit", "--dry-run", "--config",
        "--eval", "--tolerance", "--no-reference"}},
      {"Optimizer",
       {"--optimizer", "--learning-rate", "--lr-schedule", "--warmup", "--min-lr", "--momentum", "--beta1", "--beta2",
        "--weight-decay", "--clip"}},
      {"Checkpoints", {"--checkpoint", "--checkpoint-every", "--keep", "--resume", "--overwrite"}},
      {"Output", {"--output", "--log-every", "--json", "--format", "--dump", "--pt2"}},
  };
  return kGroups;
}

// Prints the groups of --help in the order of groups(). CLI11's own order is that of the first option of each.
class GroupFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    if (mode == CLI::AppFormatMode::Sub) return CLI::Formatter::make_help(app, std::move(name), mode);
    const auto options_of = [&](const std::string& group) {
      return app->get_options(
          [&](const CLI::Option* option) { return option->get_group() == group && option->nonpositional(); });
    };
    std::string text = make_description(app) + make_usage(app, std::move(name)) + make_positionals(app) +
                       make_group("Options", /*is_positional=*/false, options_of("Options"));
    for (const Group& group : groups()) {
      const std::vector<const CLI::Option*> options = options_of(group.name);
      if (!options.empty()) text += make_group(group.name, /*is_positional=*/false, options);
    }
    return text + "\n" + make_footer(app);
  }

 private:
  // Leaves out the marks of flags that switch something off, and the values of flags.
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    std::string name = CLI::Formatter::make_option_name(option, is_positional);
    constexpr std::string_view kMark = "{false}";
    for (auto found = name.find(kMark); found != std::string::npos; found = name.find(kMark)) {
      name.erase(found, kMark.size());
    }
    return name;
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_expected_max() == 0 ? "" : CLI::Formatter::make_option_opts(option);
  }
};

void group_options(CLI::App& command) {
  for (const Group& group : groups()) {
    for (const char* name : group.options) {
      if (CLI::Option* const option = command.get_option_no_throw(name)) option->group(group.name);
    }
  }
  command.formatter(std::make_shared<GroupFormatter>());
}

}  // namespace

void penstock::internal::cli::on_call(CLI::App& command, std::function<void()> run) {
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
  if (name == "split") penstock::internal::cli::add_split(*command, *exit);
  if (name == "check") penstock::internal::cli::add_check(*command, *exit);
  if (name == "run") penstock::internal::cli::add_run(*command, *exit);
  if (name == "eval") penstock::internal::cli::add_eval(*command, *exit);
  if (name == "export") penstock::internal::cli::add_export(*command, *exit);
  if (name == "train") penstock::internal::cli::add_train(*command, *exit);
  if (name == "generate") penstock::internal::cli::add_generate(*command, *exit);
  if (name == "launch") penstock::internal::cli::add_launch(*command, *exit);
}
