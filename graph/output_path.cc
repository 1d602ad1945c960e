#include "graph/output_path.h"

#include <filesystem>

#include "graph/base/error.h"

namespace trainrt {

namespace fs = std::filesystem;

OutputPath resolve_output(const std::string& path, const std::string& what) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  TRAINRT_REQUIRE(
      status.type() != fs::file_type::none, kIo, what, " cannot be written: ", error.message());
  TRAINRT_REQUIRE(!fs::is_directory(status), kIo, what, " is a folder, wanted a file");
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    return {path, true};
  }
  // A link to a file that is not there yet is followed as well; the system, asked above, has
  // refused those in a circle.
  fs::path file = path;
  while (fs::is_symlink(fs::symlink_status(file, error))) {
    const fs::path target = fs::read_symlink(file, error);
    TRAINRT_REQUIRE(!error, kIo, what, " cannot be written: ", error.message());
    file = file.parent_path() / target;  // an absolute target stands alone
  }
  return {file.string(), false};
}

}  // namespace trainrt
