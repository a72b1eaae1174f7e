// The penstock command.
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/base/nearest.h"
#include "penstock/cli/command.h"
#include "penstock/cli/load.h"
#include "penstock/cli/option_hints.h"
#include "penstock/cli/terminal.h"

namespace penstock::internal::cli {
namespace {

// Returns the last subcommand that was parsed before the error.
const CLI::App& deepest(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : deepest(*chosen.back());
}

std::string suggestion_for(const CLI::App& app, const std::string& path, const std::string& word) {
  std::vector<std::string> words;
  if (word.starts_with('-')) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) words.push_back("--" + name);
    }
  } else {
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
      words.push_back(command->get_name());
  }
  if (const auto near = nearest(word, words)) return "did you mean " + *near + "?";
  return "see " + path + " --help.";
}

// Prints what is wrong with the command line, with the nearest valid word as a hint.
void explain_usage(const CLI::App& root, const CLI::ParseError& error) {
  const CLI::App& app = deepest(root);
  const std::vector<std::string> left = app.remaining();
  std::string path = "penstock";
  for (const CLI::App* command = &root; !command->get_subcommands().empty();) {
    command = command->get_subcommands().back();
    path += " " + command->get_name();
  }
  if (!left.empty()) {
    const auto option =
        std::find_if(left.begin(), left.end(), [](const std::string& word) { return word.starts_with('-'); });
    const bool takes_commands = !app.get_subcommands([](const CLI::App*) { return true; }).empty();
    const std::string& word = takes_commands || option == left.end() ? left.front() : *option;
    const std::string name = word.substr(0, word.find('='));
    const char* const kind = name.starts_with('-') ? "option" : takes_commands ? "command" : "argument";
    std::cerr << path << ": unknown " << kind << " '" << name << "'.\n  Hint: " << suggestion_for(app, path, name)
              << "\n";
    return;
  }
  std::cerr << path << ": " << error.what() << "\n  Hint: see " << path << " --help.\n";
}

int run(int argc, char** argv) {
  CLI::App app("Penstock: pipeline parallelism for PyTorch models.", "penstock");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("penstock ") + PENSTOCK_VERSION);
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.failure_message([](const CLI::App*, const CLI::Error&) { return std::string(); });
  int exit = kSuccess;
  add_schedule_command(app, exit);
  add_program_commands(app, argc > 1 ? argv[1] : "", exit);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    exit = app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    explain_usage(app, error);
    return kUsageError;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::filesystem::filesystem_error&) {
    throw;
  } catch (const std::exception& error) {
    const CLI::App& command = deepest(app);
    const auto has_option = [&](const std::string& name) { return command.get_option_no_throw(name) != nullptr; };
    std::cerr << "penstock: " << with_option_hints(error.what(), has_option) << "\n";
    return kUsageError;
  }
  if (!std::cout.flush()) throw std::runtime_error("standard output could not be written.");
  return exit;
}

}  // namespace
}  // namespace penstock::internal::cli

int main(int argc, char** argv) {
  const penstock::internal::cli::PrintableOutput printable;
  try {
    return penstock::internal::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    // A stream might allocate.
    constexpr std::string_view kMessage = "penstock: not enough memory.\n";
    static_cast<void>(!::write(STDERR_FILENO, kMessage.data(), kMessage.size()));
  } catch (const std::filesystem::filesystem_error& error) {
    std::cerr << "penstock: " << error.path1().string() << ": " << error.code().message() << ".\n";
  } catch (const std::exception& error) {
    std::cerr << "penstock: " << error.what() << "\n";
  }
  return penstock::internal::cli::kUsageError;
}
