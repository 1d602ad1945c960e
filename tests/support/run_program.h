// Starts the program under test as a user would.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace trainrt::testing {

struct ProgramResult {
  int exit_code = -1;  // 128 + n when signal n ended it
  std::string out;
  std::string err;
};

// Runs build/trainrt to its end.
ProgramResult run_trainrt(const std::vector<std::string>& arguments);

// The example model `words` ("gpt2 --layers 1") as a file; throws when it could not be written.
void write_model(const std::string& words, const std::string& file);

// Starts it and returns its process id; output goes to files in `folder` ("out", "err").
pid_t start_trainrt(const std::vector<std::string>& arguments, const std::string& folder);
// Waits for its end.
ProgramResult finish_trainrt(pid_t pid, const std::string& folder);

// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string file_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);

}  // namespace trainrt::testing
