// A command of the program: `trainrt NAME ...`. Each registers itself from its own file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/options.h"

namespace trainrt {

struct Command {
  std::string name;
  std::string arguments;  // "MODEL.onnx", as shown by the usage line
  std::string summary;
  unsigned groups = 0;  // the options it takes
  int min_arguments = 0;
  int max_arguments = 0;  // < 0: any number
  // Returns the exit code; an Error thrown becomes a message and its own code.
  std::function<int(const Options&)> run;
  std::function<std::string()> notes = nullptr;  // that --help ends with
  bool starts_ranks = false;                     // which may be processes that meet (with_ranks)
};

struct RegisterCommand {
  explicit RegisterCommand(Command command);
};

const std::vector<Command>& commands();

// Writes a command's result: to --output-file (by temporary name and rename) or to stdout.
void write_result(const std::string& text, const Options& options);

}  // namespace trainrt
