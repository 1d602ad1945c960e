// A line per choice, "key<tab>choice", appended in one write: of several writers none loses what
// another one writes, and a line that was cut off by the end of a process is skipped.
#include "graph/algorithm_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "graph/base/error.h"
#include "graph/base/log.h"

namespace trainrt {

AlgorithmCache::AlgorithmCache(std::string path) : path_(std::move(path)) {
  if (path_.empty()) {
    return;
  }
  std::ifstream file(path_, std::ios::binary);
  int skipped = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t tab = line.find('\t');
    const bool whole = tab != std::string::npos && tab > 0 && tab + 1 < line.size() && !file.eof();
    if (whole) {
      choices_[line.substr(0, tab)] = line.substr(tab + 1);
    } else {
      ++skipped;
    }
  }
  if (skipped > 0) {
    log_warning("'", path_, "': ", skipped, " lines are not measured choices and are passed over");
  }
}

std::optional<std::string> AlgorithmCache::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto at = choices_.find(key);
  return at == choices_.end() ? std::nullopt : std::optional<std::string>(at->second);
}

void AlgorithmCache::keep(const std::string& key, const std::string& choice) {
  const std::lock_guard lock(mutex_);
  choices_[key] = choice;
  if (path_.empty()) {
    return;
  }
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const std::string line = concat(key, '\t', choice, '\n');
  const int file = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const bool written =
      file >= 0 && ::write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  if (file >= 0) {
    ::close(file);
  }
  if (!written) {
    log_warning(
        "cannot keep measured algorithms in '", path_, "': they are measured anew next time");
    path_.clear();
  }
}

}  // namespace trainrt
