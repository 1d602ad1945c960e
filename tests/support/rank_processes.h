// Ranks as processes of the program under test, as a launcher would start them.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.h"

namespace trainrt::testing {

using Variables = std::vector<std::pair<std::string, std::string>>;

struct RankEnd {
  ProgramResult result;
  bool ended = false;  // by itself, within the limit; else it was killed
  std::chrono::steady_clock::time_point time;
};

class RankProcesses {
 public:
  RankProcesses() = default;
  ~RankProcesses();  // kills what still runs
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Starts the next rank: `command` and its arguments, with these variables beside the test's own.
  void start(const std::vector<std::string>& command, const Variables& variables);
  // All ranks of a world; rank 0 gets a port that is its own already. A rank in `stop_at` stops
  // itself when it begins that activity (RankPlace::stop_at).
  void start_world(int world_size,
                   const std::vector<std::string>& arguments,
                   const std::map<int, std::string>& stop_at = {});

  void send_signal(int rank, int signal) const;
  // Whether the rank has stopped itself within `limit`.
  bool wait_until_stopped(int rank, std::chrono::milliseconds limit) const;
  // Waits for every rank, at most until `limit` has passed, and kills those that remain: those of
  // `stopped`, which cannot end, as soon as all others have.
  std::vector<RankEnd> wait(std::chrono::milliseconds limit, std::optional<int> stopped = {});

 private:
  struct Process {
    pid_t pid = -1;  // -1: it has been waited for
    std::unique_ptr<TemporaryFolder> folder;
  };
  std::vector<Process> processes_;
};

// A port of this machine that was free a moment ago.
int free_port();

}  // namespace trainrt::testing
