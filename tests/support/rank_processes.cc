#include "tests/support/rank_processes.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "parallel/socket.h"
#include "tests/support/paths.h"

namespace trainrt::testing {

namespace {

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) {
    all.push_back(word.data());
  }
  all.push_back(nullptr);
  return all;
}

pid_t start_process(std::vector<std::string> command,
                    const Variables& variables,
                    const std::string& folder) {
  std::vector<char*> argv = pointers(command);
  const std::string out = folder + "/out", err = folder + "/err";
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (const auto& [name, value] : variables) {
      ::setenv(name.c_str(), value.c_str(), 1);
      if (name == "TRAINRT_LISTENING_FD") {
        ::fcntl(std::atoi(value.c_str()), F_SETFD, 0);
      }
    }
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), STDERR_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  return pid;
}

}  // namespace

RankProcesses::~RankProcesses() {
  for (const Process& process : processes_) {
    if (process.pid > 0) {
      ::kill(process.pid, SIGKILL);
      ::waitpid(process.pid, nullptr, 0);
    }
  }
}

void RankProcesses::start(const std::vector<std::string>& command, const Variables& variables) {
  Process process;
  process.folder = std::make_unique<TemporaryFolder>();
  process.pid = start_process(command, variables, process.folder->path());
  processes_.push_back(std::move(process));
}

void RankProcesses::start_world(int world_size,
                                const std::vector<std::string>& arguments,
                                const std::map<int, std::string>& stop_at) {
  const Socket listener = Socket::listening(0);
  std::vector<std::string> command = {trainrt_binary()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  for (int rank = 0; rank < world_size; ++rank) {
    Variables variables = {
        {"TRAINRT_RANK", std::to_string(rank)},
        {"TRAINRT_WORLD_SIZE", std::to_string(world_size)},
        {"TRAINRT_ADDRESS", "127.0.0.1:" + std::to_string(listener.local_port())}};
    if (rank == 0) {
      variables.emplace_back("TRAINRT_LISTENING_FD", std::to_string(listener.fd()));
    }
    if (const auto at = stop_at.find(rank); at != stop_at.end()) {
      variables.emplace_back("TRAINRT_STOP_AT", at->second);
    }
    start(command, variables);
  }
}

void RankProcesses::send_signal(int rank, int signal) const {
  ::kill(processes_.at(static_cast<size_t>(rank)).pid, signal);
}

bool RankProcesses::wait_until_stopped(int rank, std::chrono::milliseconds limit) const {
  const auto until = std::chrono::steady_clock::now() + limit;
  const std::string id = std::to_string(processes_.at(static_cast<size_t>(rank)).pid);
  while (std::chrono::steady_clock::now() < until) {
    const std::string status = file_text("/proc/" + id + "/stat");  // "17 (trainrt) T ..."
    const size_t name_end = status.rfind(") ");
    if (name_end != std::string::npos && status.compare(name_end + 2, 1, "T") == 0) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

std::vector<RankEnd> RankProcesses::wait(std::chrono::milliseconds limit,
                                         std::optional<int> stopped) {
  const auto until = std::chrono::steady_clock::now() + limit;
  std::vector<RankEnd> ends(processes_.size());
  const auto take = [&](size_t rank, int status) {
    Process& process = processes_[rank];
    process.pid = -1;
    RankEnd& end = ends[rank];
    end.time = std::chrono::steady_clock::now();
    end.result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    end.result.out = file_text(process.folder->file("out"));
    end.result.err = file_text(process.folder->file("err"));
  };
  const auto remaining = [&] {
    int count = 0;
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      count += processes_[rank].pid > 0 && static_cast<int>(rank) != stopped ? 1 : 0;
    }
    return count;
  };
  while (remaining() > 0 && std::chrono::steady_clock::now() < until) {
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      int status = 0;
      if (processes_[rank].pid > 0 && ::waitpid(processes_[rank].pid, &status, WNOHANG) > 0) {
        take(rank, status);
        ends[rank].ended = true;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    if (processes_[rank].pid > 0) {
      int status = 0;
      ::kill(processes_[rank].pid, SIGKILL);
      ::waitpid(processes_[rank].pid, &status, 0);
      take(rank, status);
    }
  }
  return ends;
}

int free_port() {
  return Socket::listening(0).local_port();
}

}  // namespace trainrt::testing
