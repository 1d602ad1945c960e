// Where writing to a path leads: to a file that is to be replaced as a whole, or to a device or a
// pipe, which is written as it is.
#pragma once

#include <string>

namespace trainrt {

struct OutputPath {
  std::string path;  // of a file: what links lead to, so that a link stays a link
  bool is_stream = false;
};

// Throws kIo, in words that begin with `what`, for a folder, for links that lead in a circle and
// for whatever else the system cannot look up.
OutputPath resolve_output(const std::string& path, const std::string& what);

}  // namespace trainrt
