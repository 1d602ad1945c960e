// The parent does nothing but wait for signals: those of children that end, those to pass on, and a
// timer's. A rank is in a process group of its own, so that Ctrl-C reaches it once, through the
// parent, and is told by the kernel when the parent dies.
#include "runtime/local_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "graph/base/log.h"
#include "runtime/version.h"

namespace trainrt {

namespace {

constexpr std::chrono::seconds kGrace{5};  // for the others, after a rank has failed
constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

std::vector<std::string> own_arguments() {
  std::ifstream stream("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(stream, word, '\0');) {
    words.push_back(word);
  }
  return words;
}

// What exec wants; made before fork, after which only few functions may be called.
class StringArray {
 public:
  explicit StringArray(std::vector<std::string> words) : words_(std::move(words)) {
    for (std::string& word : words_) {
      pointers_.push_back(word.data());
    }
    pointers_.push_back(nullptr);
  }
  char* const* get() const { return pointers_.data(); }

 private:
  std::vector<std::string> words_;
  std::vector<char*> pointers_;
};

// This process's variables with the rank's in the place of older ones.
std::vector<std::string> environment_of(const RankPlace& place) {
  std::vector<std::string> variables;
  const auto own = rank_variables(place);
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string variable = *at;
    const std::string name = variable.substr(0, variable.find('='));
    bool replaced = false;
    for (const auto& [key, value] : own) {
      replaced = replaced || key == name;
    }
    if (!replaced) {
      variables.push_back(variable);
    }
  }
  for (const auto& [key, value] : own) {
    variables.push_back(key + "=" + value);
  }
  return variables;
}

pid_t start_rank(const RankPlace& place, const sigset_t& mask) {
  const StringArray arguments(own_arguments());
  const StringArray variables(environment_of(place));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  TRAINRT_REQUIRE(pid >= 0,
                  kDevice,
                  "cannot start rank ",
                  place.rank,
                  ": ",
                  std::generic_category().message(errno));
  if (pid == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) {
      ::_exit(128 + SIGTERM);  // it died before it could be watched
    }
    if (place.listening_fd >= 0) {
      ::fcntl(place.listening_fd, F_SETFD, 0);
    }
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execve("/proc/self/exe", arguments.get(), variables.get());
    ::_exit(127);
  }
  return pid;
}

class LocalRanks {
 public:
  LocalRanks() {
    ::sigemptyset(&waited_);
    ::sigaddset(&waited_, SIGCHLD);
    for (const int signal : kForwarded) {
      ::sigaddset(&waited_, signal);
    }
    ::sigprocmask(SIG_BLOCK, &waited_, &before_);
  }
  ~LocalRanks() {
    for (const auto& [pid, rank] : running_) {  // only when starting them failed half-way
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  void start(const RankPlace& place) { running_[start_rank(place, before_)] = place.rank; }

  int wait() {
    while (!running_.empty()) {
      const timespec second{1, 0};
      const int signal = ::sigtimedwait(&waited_, nullptr, &second);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal > 0) {
        for (const auto& [pid, rank] : running_) {
          ::kill(pid, signal);
        }
      }
      if (exit_code_ != 0) {
        end_others();
      }
    }
    return exit_code_;
  }

 private:
  // A stopped one cannot end by itself, the others have some time.
  void end_others() {
    const bool late = SteadyClock::now() > failed_at_ + kGrace;
    for (const auto& [pid, rank] : running_) {
      const bool is_stopped = stopped_.count(pid) != 0;
      if ((late || is_stopped) && killed_.insert(pid).second) {
        const std::string why =
            is_stopped ? "is stopped" : concat("has not ended within ", kGrace.count(), " s");
        log_message(LogLevel::kError, concat("rank ", rank, " ", why, " and is killed"));
        ::kill(pid, SIGKILL);
      }
    }
  }

  void reap() {
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;) {
      const auto at = running_.find(pid);
      if (WIFSTOPPED(status)) {
        stopped_.insert(pid);
      } else {
        stopped_.erase(pid);
      }
      if (at == running_.end() || (!WIFEXITED(status) && !WIFSIGNALED(status))) {
        continue;
      }
      const int communication = exit_code(ErrorCode::kCommunication);
      int code = WIFEXITED(status) ? WEXITSTATUS(status) : communication;
      if (WIFSIGNALED(status) && killed_.count(pid) == 0) {
        log_message(LogLevel::kError,
                    concat("rank ", at->second, " was ended by signal ", WTERMSIG(status)));
      }
      running_.erase(at);
      if (code != 0 && exit_code_ == 0) {
        failed_at_ = SteadyClock::now();
      }
      if (code != 0 && (exit_code_ == 0 || exit_code_ == communication)) {
        exit_code_ = code;
      }
    }
  }

  sigset_t waited_;
  sigset_t before_;
  std::map<pid_t, int> running_;  // to ranks
  std::set<pid_t> stopped_;
  std::set<pid_t> killed_;  // by this process
  int exit_code_ = 0;
  SteadyClock::time_point failed_at_ = SteadyClock::time_point::max() - kGrace;
};

}  // namespace

Launch local_launch(int num_ranks) {
  Launch launch;
  launch.launcher = "--nproc";
  launch.num_local = num_ranks;
  launch.place.world_size = num_ranks;
  // Apart from any other run, whatever reaches its port.
  launch.place.job = concat(std::random_device()());
  return launch;
}

int run_local_ranks(const Launch& launch) {
  RankPlace place = launch.place;
  // Open before any rank starts, so that nobody else can take the port, and passed on to rank 0.
  Socket listener;
  if (place.rank == 0) {
    listener = Socket::listening(place.port);
    place.port = listener.local_port();
  }
  LocalRanks ranks;
  for (int i = 0; i < launch.num_local; ++i) {
    place.rank = launch.place.rank + i;
    place.listening_fd = place.rank == 0 ? listener.fd() : -1;
    ranks.start(place);
  }
  listener.close();
  return ranks.wait();
}

}  // namespace trainrt
