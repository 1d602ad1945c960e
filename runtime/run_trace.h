// `run --trace`: what each rank did when.
#pragma once

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/plan.h"
#include "parallel/trace_events.h"

namespace trainrt {

// One rank's events of the running step; the executor fills it.
class StepTrace {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StepTrace(Clock::time_point origin) : origin_(origin) {}
  void add(const std::string& name,
           TraceLane lane,
           Clock::time_point start,
           Clock::time_point end,
           int64_t bytes = -1,
           std::string op_type = "");
  std::vector<TraceEvent>& events() { return events_; }

 private:
  Clock::time_point origin_;
  std::vector<TraceEvent> events_;
};

// The file, which rank 0 writes step by step with what all ranks send it. Times count from a moment
// at which all ranks met, so ranks of several hosts agree to within the time of a barrier. Every
// member function is collective over the ranks, where it does not say otherwise.
class RunTrace {
 public:
  // `world` may be null for a single rank. Throws kIo.
  RunTrace(const std::string& path, const Plan& plan, Communicator* world);

  StepTrace& recorder() { return recorder_; }
  // Collective only with `meets`; without, the step's events wait for a step that does.
  void end_step(int64_t step, bool meets);
  // Ends the file. Rank 0 returns a line per rank on how its time was spent, others nothing.
  std::string finish();

 private:
  // The concatenation of all ranks' texts, on all ranks.
  std::string gather(const std::string& own) const;

  std::string path_;
  Communicator* world_;
  int rank_ = 0;
  StepTrace recorder_;
  TraceTotals totals_;
  std::string lines_;   // not written yet
  double seconds_ = 0;  // of all steps, from first event to last
  std::ofstream file_;
  std::ostream* stream_ = &file_;  // or stdout or stderr where these lead to `path_`
};

}  // namespace trainrt
