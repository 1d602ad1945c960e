// Messages for a person, on stderr. stdout belongs to results alone.
#pragma once

#include <string>

#include "graph/base/error.h"

namespace trainrt {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kSilent };

// Messages below `level` are dropped. Default kInfo. Thread-safe.
void set_log_level(LogLevel level);

// Prefixed to each line, e.g. "[rank 3] "; per thread, so ranks that are threads keep theirs.
void set_log_prefix(std::string prefix);

// Writes one whole line to stderr, thread-safe.
void log_message(LogLevel level, const std::string& message);

template <typename... Args>
void log_info(const Args&... args) {
  log_message(LogLevel::kInfo, concat(args...));
}

template <typename... Args>
void log_warning(const Args&... args) {
  log_message(LogLevel::kWarning, concat(args...));
}

template <typename... Args>
void log_debug(const Args&... args) {
  log_message(LogLevel::kDebug, concat(args...));
}

}  // namespace trainrt
