#include "graph/base/log.h"

#include <atomic>
#include <cstdio>

namespace trainrt {

namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
thread_local std::string t_prefix;

const char* label(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug: ";
    case LogLevel::kWarning:
      return "warning: ";
    case LogLevel::kError:
      return "error: ";
    default:
      return "";
  }
}

}  // namespace

void set_log_level(LogLevel level) {
  g_level = level;
}

void set_log_prefix(std::string prefix) {
  t_prefix = std::move(prefix);
}

void log_message(LogLevel level, const std::string& message) {
  if (level < g_level) {
    return;
  }
  // One fputs of one string, so that lines of several threads do not mix.
  const std::string line = t_prefix + label(level) + message + "\n";
  std::fputs(line.c_str(), stderr);
}

}  // namespace trainrt
