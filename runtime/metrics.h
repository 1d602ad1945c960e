// What a run tells about each step: JSON lines for programs, a progress line for a person.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace trainrt {

struct StepMetrics {
  int64_t step = 0;  // from 1
  double loss = 0;
  double lr = 0;
  double grad_norm = 0;
  int64_t samples = 0;  // of this step, all ranks
  double step_seconds = 0;
  std::vector<int64_t> peak_bytes;  // by rank
  int64_t position = 0;             // global sample count after the step
  double epoch = 0;
  double loss_scale = 0;  // 0: no loss scaling, and not written
  bool skipped = false;   // with loss scaling: nothing was updated
  // With --max-tokens: tokens of the step, and with their padding by data rank. Else not written.
  int64_t tokens = 0;
  std::vector<int64_t> padded_tokens;
  // With --rebalance: the parts of the data ranks in the step. Else not written.
  std::vector<int64_t> shares;
};

// One JSON object per step and line, numbers in shortest round-trip form, flushed as written.
class MetricsFile {
 public:
  // Starts anew; with `keep_steps` >= 0 (resume) keeps the lines of steps up to it and continues.
  // Throws kIo.
  MetricsFile(const std::string& path, int64_t keep_steps);
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream file_;
  std::ostream* stream_;  // file_, or stdout or stderr where these lead to `path_`
};

std::string metrics_line(const StepMetrics& metrics);

// "812 KiB", "1.4 GiB".
std::string bytes_text(int64_t bytes);

// The step as a person reads it, in at most `width` columns (0: any number): what matters least is
// left out first.
struct ProgressFigures {
  int64_t total_steps = 0;
  double samples_per_second = 0;
  double seconds_left = -1;  // < 0: not shown
  bool bar = false;
};
std::string progress_text(const StepMetrics& metrics, const ProgressFigures& figures, int width);

// On a terminal one line that is written over; elsewhere plain lines, at most one in two seconds.
// On stderr.
class Progress {
 public:
  explicit Progress(int64_t total_steps);
  ~Progress();
  void show(const StepMetrics& metrics);
  // Ends the written-over line, so that other messages start on one of their own.
  void finish();

 private:
  int64_t total_steps_;
  bool terminal_;
  bool open_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;  // that a step was shown
  int64_t samples_ = 0;                         // since then
  int64_t first_step_ = -1;
};

}  // namespace trainrt
