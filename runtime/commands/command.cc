#include "runtime/commands/command.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ostream>

#include "graph/base/error.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

std::vector<Command>& registry() {
  static std::vector<Command> list;
  return list;
}

}  // namespace

RegisterCommand::RegisterCommand(Command command) {
  registry().push_back(std::move(command));
}

const std::vector<Command>& commands() {
  std::sort(registry().begin(), registry().end(), [](const Command& a, const Command& b) {
    return a.name < b.name;
  });
  return registry();
}

void write_result(const std::string& text, const Options& options) {
  if (!options.output_file.empty()) {
    write_file_atomically(options.output_file, [&](std::ostream& out) { out << text; });
    return;
  }
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  TRAINRT_REQUIRE(
      written && std::fflush(stdout) == 0, kIo, "cannot write to stdout: ", std::strerror(errno));
}

}  // namespace trainrt
