#include "tests/support/run_program.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "tests/support/paths.h"

namespace trainrt::testing {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::temp_directory_path() / "trainrt-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error("cannot create a temporary folder");
  }
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string file_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

void write_model(const std::string& words, const std::string& file) {
  std::vector<std::string> arguments = {"model"};
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    arguments.push_back(word);
  }
  arguments.insert(arguments.end(), {"-o", file});
  const ProgramResult result = run_trainrt(arguments);
  if (result.exit_code != 0) {
    throw std::runtime_error("cannot write the model '" + words + "': " + result.err);
  }
}

pid_t start_trainrt(const std::vector<std::string>& arguments, const std::string& folder) {
  std::vector<std::string> words = {trainrt_binary()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  const std::string out = folder + "/out", err = folder + "/err";
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int out_fd = ::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const int err_fd = ::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ::dup2(out_fd, STDOUT_FILENO);
    ::dup2(err_fd, STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  return pid;
}

ProgramResult finish_trainrt(pid_t pid, const std::string& folder) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  ProgramResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.out = file_text(folder + "/out");
  result.err = file_text(folder + "/err");
  return result;
}

ProgramResult run_trainrt(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  return finish_trainrt(start_trainrt(arguments, folder.path()), folder.path());
}

}  // namespace trainrt::testing
