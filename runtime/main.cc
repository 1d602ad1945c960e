// The program: finds the command, maps errors to exit codes. The only place that prints errors.
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "graph/base/log.h"
#include "runtime/commands/command.h"
#include "runtime/option_checks.h"
#include "runtime/ranks.h"
#include "runtime/thread_waiting.h"
#include "runtime/version.h"

namespace trainrt {

namespace {

std::string overview() {
  std::string text =
      "trainrt " + version() + ": trains the model in an ONNX file, and plans how to.\n\n";
  for (const Command& command : commands()) {
    std::string usage = "  trainrt " + command.name + " " + command.arguments;
    usage.resize(std::max<size_t>(usage.size() + 2, 34), ' ');
    text += usage + command.summary + "\n";
  }
  return text + "\n'trainrt COMMAND --help' lists a command's options.\n";
}

const Command& find_command(const std::string& name) {
  std::vector<std::string> names;
  for (const Command& command : commands()) {
    if (command.name == name) {
      return command;
    }
    names.push_back(command.name);
  }
  TRAINRT_FAIL(kInvalidArgument,
               "unknown command '",
               name,
               "'",
               did_you_mean(name, names),
               near_names(name, names).empty() ? ";" : "",
               " 'trainrt --help' lists them");
}

// The help of a command's options, under a usage line of its own arguments.
std::string help_text(const Command& command, std::string options) {
  const std::string words = "[...]";
  const size_t at = options.find(words);
  if (at != std::string::npos) {
    options.replace(at, words.size(), command.arguments);
  }
  const std::string arguments = command.arguments.empty() ? "" : " " + command.arguments;
  options.erase(options.find_last_not_of('\n') + 1);
  return "trainrt " + command.name + arguments + ": " + command.summary + "\n" + options + "\n" +
         (command.notes ? command.notes() : "");
}

Options checked_options(const Command& command, const std::vector<std::string>& arguments) {
  const Options options = parse_options(command.name, command.groups, arguments);
  const int count = static_cast<int>(options.arguments.size());
  TRAINRT_REQUIRE(count >= command.min_arguments,
                  kInvalidArgument,
                  "'trainrt ",
                  command.name,
                  "' wants ",
                  command.arguments,
                  "; see 'trainrt ",
                  command.name,
                  " --help'");
  TRAINRT_REQUIRE(command.max_arguments < 0 || count <= command.max_arguments,
                  kInvalidArgument,
                  "'trainrt ",
                  command.name,
                  "' takes ",
                  command.arguments.empty() ? "no argument" : command.arguments + " only",
                  ", got '",
                  options.arguments.back(),
                  "' as well");
  check_files(command.name, options);
  return options;
}

int run_command(const Command& command, const std::vector<std::string>& arguments) {
  Options options;
  try {
    options = checked_options(command, arguments);
  } catch (const HelpRequested& help) {
    std::fputs(help_text(command, help.text).c_str(), stdout);
    return 0;
  } catch (const Error& error) {
    if (!command.starts_ranks) {
      throw;
    }
    log_message(LogLevel::kError, error.what());  // before the others, who may be late, are told
    decline_rank(error);
    return exit_code(error.code());
  }
  return command.run(options);
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h" ||
      arguments[0] == "help") {
    std::fputs(overview().c_str(), arguments.empty() ? stderr : stdout);
    return arguments.empty() ? exit_code(ErrorCode::kInvalidArgument) : 0;
  }
  for (const std::string& argument : arguments) {
    if (argument == "--version") {
      std::fputs(("trainrt " + version() + "\n").c_str(), stdout);
      return 0;
    }
  }
  return run_command(find_command(arguments[0]), {arguments.begin() + 1, arguments.end()});
}

}  // namespace

}  // namespace trainrt

int main(int argc, char** argv) {
  using namespace trainrt;
  limit_spinning(argv);
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit of its size becomes an I/O error
  try {
    return run({argv + 1, argv + argc});
  } catch (const Error& error) {
    log_message(LogLevel::kError, error.what());
    return exit_code(error.code());
  } catch (const std::bad_alloc&) {
    log_message(LogLevel::kError, "the machine ran out of memory");
    return exit_code(ErrorCode::kOutOfMemory);
  } catch (const std::exception& error) {
    log_message(LogLevel::kError, concat("internal error: ", error.what()));
    return exit_code(ErrorCode::kInternal);
  }
}
