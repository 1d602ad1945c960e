// One rank of a run, from allocation to the last step.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/checkpoint.h"
#include "runtime/compiled_ranks.h"
#include "runtime/data_loader.h"
#include "runtime/executor.h"
#include "runtime/loss_scaler.h"
#include "runtime/metrics.h"
#include "runtime/parameter_store.h"
#include "runtime/rank_groups.h"
#include "runtime/rebalancer.h"
#include "runtime/resume.h"
#include "runtime/run_trace.h"
#include "runtime/stop_question.h"
#include "runtime/trainer.h"
#include "runtime/training_job.h"

namespace trainrt {

// What all ranks of a run share, read-only while they run.
struct Run {
  const Options& options;
  const TrainingSeams& seams;
  TrainingJob job;
  std::vector<DeviceOptions> devices = {};  // by rank
  Plan plan = {};  // to begin with: --rebalance changes it, rank by rank alike
  StepRange range = {};
  std::vector<int64_t> sizes = {};  // of steps, in samples: what programs are compiled for
  std::vector<CompiledRank> ranks = {};
  std::shared_ptr<const Checkpoint> checkpoint = nullptr;  // to begin from
  TensorsOfResume tensors = {};                            // that not both of them train
  std::optional<int> only_rank = std::nullopt;  // of this process; nothing when it runs all
  int exit_code = 0;                            // set by the first rank of this process
  std::shared_ptr<std::mutex> compiling = std::make_shared<std::mutex>();
};

class RankRunner {
 public:
  RankRunner(Run& run, int rank, Communicator* world);

  void train();
  StepResult evaluate();

 private:
  void gather_peaks();
  StepFeed feed_of(const StepData& data, int64_t step) const;
  // `next`: the step after it, where the pipeline runs on; null: it drains.
  StepResult run_step(const StepData& data, int64_t step, const StepData* next = nullptr);
  std::string bad_value_in(const StepData& data) const;
  void blame_weights(Error& error) const;
  bool runs_on(const StepData& data) const;
  const StepData* next_in_pipeline(DataLoader& loader, const StepData& data, int64_t step) const;
  bool is_checkpoint_due(int64_t steps_done) const;
  bool asked_to_stop(bool drained = true);
  void write_aside(const std::function<void()>& write);
  void rethrow_output_error(int64_t saved_step, bool exported) const;
  void save(int64_t step, int64_t position);
  CheckpointTensor tensor_to_save(const std::string& name) const;
  void export_model();
  bool on_gpu() const;
  LoaderOptions loader_options(bool shuffle) const;
  std::unique_ptr<DataLoader> make_loader(bool shuffle, int64_t start) const;
  void arrange(StepData& step) const;
  void report(const StepData& data, const StepResult& result, int64_t step, double seconds);

  // --rebalance. seconds_of_data_ranks is collective.
  std::unique_ptr<Rebalancer> make_rebalancer() const;
  std::vector<double> seconds_of_data_ranks(const StepData& data, int64_t step);
  std::optional<std::vector<int64_t>> new_units(const StepData& data, int64_t step);
  void take_units(std::optional<std::vector<int64_t>> units, int64_t step);
  void reshare(CompiledRank compiled, Plan plan);
  std::vector<bool> lacking_memory(const CompiledRank& compiled);

  Run& run_;
  int rank_;
  Communicator* world_;
  Plan plan_;
  CompiledRank compiled_;
  std::unique_ptr<Device> device_;
  RankGroups groups_;
  Executor executor_;
  ParameterStore store_;
  StopQuestion stop_question_;
  std::vector<int64_t> peak_bytes_;
  LrSchedule schedule_;
  LossScaler scaler_;
  int64_t skipped_ = 0;          // steps without an update
  std::vector<double> weights_;  // of data ranks, for --max-tokens
  std::unique_ptr<Rebalancer> rebalancer_;
  std::unique_ptr<MetricsFile> metrics_;
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<RunTrace> trace_;
  std::optional<Error> output_error_;  // of metrics_ or trace_, which ends the run
};

// A loss is a mean over items; without one there is nothing to learn from or to report.
void require_items(const StepResult& result, const std::string& where);

}  // namespace trainrt
