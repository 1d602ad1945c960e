// Which algorithm of a library was the fastest for a shape on a device: measured once, and kept in
// a file for the runs to come. Safe to use from any thread, and by several processes at once.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace trainrt {

class AlgorithmCache {
 public:
  // `path` may be empty (nothing is kept) or name a file that does not exist yet. A file that
  // cannot be read or holds something else is warned of, and no reason to fail.
  explicit AlgorithmCache(std::string path);

  // Neither holds a tab or a line's end. A key names all that the choice depends on: device,
  // library and version, problem.
  std::optional<std::string> find(const std::string& key) const;
  void keep(const std::string& key, const std::string& choice);

 private:
  std::string path_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> choices_;
};

}  // namespace trainrt
