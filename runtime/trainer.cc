#include "runtime/trainer.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>

#include "graph/base/log.h"
#include "graph/onnx_export.h"
#include "runtime/checkpoint.h"
#include "runtime/commands/command.h"
#include "runtime/compiled_ranks.h"
#include "runtime/data_loader.h"
#include "runtime/eval_result.h"
#include "runtime/executor.h"
#include "runtime/file_bytes.h"
#include "runtime/load_cuda.h"
#include "runtime/loss_scaler.h"
#include "runtime/metrics.h"
#include "runtime/parameter_store.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_groups.h"
#include "runtime/ranks.h"
#include "runtime/signals.h"
#include "runtime/start_facts.h"
#include "runtime/training_job.h"

namespace trainrt {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What all ranks of a run share, read-only while they run.
struct Run {
  const Options& options;
  TrainingJob job;
  std::vector<DeviceOptions> devices;
  Plan plan;
  StepRange range;
  std::vector<CompiledRank> ranks;
  std::optional<Checkpoint> checkpoint;  // to begin from
  std::optional<int> only_rank;          // of this process; nothing when it runs all
  int exit_code = 0;                     // set by the first rank of this process
};

// One rank, from allocation to the last step.
class RankRunner {
 public:
  RankRunner(Run& run, int rank, Communicator* world)
      : run_(run),
        rank_(rank),
        world_(world),
        compiled_(run.ranks[static_cast<size_t>(rank)]),
        device_(make_device(rank, run.devices[static_cast<size_t>(rank)])),
        groups_(run.plan, world, *device_),
        executor_(*device_, groups_.communicators(), run.job.input_names),
        store_(executor_, *compiled_.programs[0]) {
    for (size_t i = 0; i < compiled_.programs.size(); ++i) {
      executor_.add_program(compiled_.programs[i], compiled_.memories[i]);
    }
    executor_.load();
    store_.share_ownership(world_);
    store_.load_initial();
    if (run.checkpoint) {
      store_.load([&](const std::string& name) { return run.checkpoint->read(name); });
    }
    const int64_t own = executor_.arena_bytes();
    peak_bytes_.assign(run.ranks.size(), own);
    if (world_ != nullptr) {
      world_->all_gather(
          &own, peak_bytes_.data(), std::vector<int64_t>(run.ranks.size(), 1), DType::kInt64);
    }
  }

  void train();
  StepResult evaluate();

 private:
  StepResult run_step(const StepData& data, int64_t step);
  bool asked_to_stop();
  void save(int64_t step, int64_t position);
  void export_model();
  LoaderOptions loader_options(bool shuffle) const;
  void report(const StepData& data, const StepResult& result, int64_t step, double seconds);

  Run& run_;
  int rank_;
  Communicator* world_;
  const CompiledRank& compiled_;
  std::unique_ptr<Device> device_;
  RankGroups groups_;
  Executor executor_;
  ParameterStore store_;
  std::vector<int64_t> peak_bytes_;
  LrSchedule schedule_;
  LossScaler scaler_;
  int64_t skipped_ = 0;  // steps without an update
  std::unique_ptr<MetricsFile> metrics_;
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<RunTrace> trace_;
};

LoaderOptions RankRunner::loader_options(bool shuffle) const {
  LoaderOptions loader;
  loader.seed = static_cast<uint64_t>(run_.options.seed);
  loader.shuffle = shuffle;
  loader.batch = run_.options.batch_size;
  loader.start = run_.range.start;
  loader.stop = run_.range.stop;
  return loader;
}

StepResult RankRunner::run_step(const StepData& data, int64_t step) {
  StepFeed feed;
  feed.seed = static_cast<uint64_t>(run_.options.seed);
  feed.step = step;
  feed.update = step - skipped_;
  feed.learning_rate = schedule_.at(feed.update);
  feed.loss_scale = scaler_.scale();
  feed.skip_overflow = scaler_.active();
  feed.inputs = &data.inputs;
  return executor_.run_step(compiled_.program_of_size.at(data.num_samples), feed);
}

// All ranks stop after the same step, whichever process got the signal.
bool RankRunner::asked_to_stop() {
  const int first_rank = run_.only_rank.value_or(0);
  int64_t signal = rank_ == first_rank ? stop_signal() : 0;
  if (world_ != nullptr) {
    world_->all_reduce(&signal, 1, DType::kInt64, ReductionKind::kMax);
  }
  if (signal != 0 && rank_ == first_rank) {
    run_.exit_code = 128 + static_cast<int>(signal);
  }
  return signal != 0;
}

void RankRunner::save(int64_t step, int64_t position) {
  TrainingPosition at;
  at.step = step;
  at.skipped = skipped_;
  at.position = position;
  at.loss_scale = scaler_.scale();
  at.finite_steps = scaler_.finite_steps();
  at.seed = run_.options.seed;
  at.model_hash = run_.job.model->hash();
  write_checkpoint(
      run_.options.checkpoint_dir,
      at,
      store_.owned_names(),
      [&](const std::string& name) { return store_.piece(name); },
      world_);
}

void RankRunner::report(const StepData& data,
                        const StepResult& result,
                        int64_t step,
                        double seconds) {
  StepMetrics m;
  m.step = step + 1;
  m.loss = result.loss();
  m.lr = schedule_.at(step - skipped_);
  m.grad_norm = result.grad_norm;
  m.samples = data.num_samples;
  m.step_seconds = seconds;
  m.peak_bytes = peak_bytes_;
  m.position = data.position + data.num_samples;
  const int64_t n = run_.job.dataset->num_samples();
  m.loss_scale = scaler_.active() ? scaler_.scale() : 0;
  m.skipped = result.skipped;
  m.epoch = n == kEndlessSamples ? 0 : static_cast<double>(m.position) / static_cast<double>(n);
  if (metrics_) {
    metrics_->write(m);
  }
  progress_->show(m);
}

// A loss is a mean over items; without one there is nothing to learn from or to report.
void require_items(const StepResult& result, const std::string& where) {
  TRAINRT_REQUIRE(result.item_count > 0,
                  kInvalidArgument,
                  where,
                  "no item counts: every label is ignored (-100). Look at the labels, or take a "
                  "larger --batch-size");
}

void RankRunner::train() {
  const Options& options = run_.options;
  schedule_ = {lr_schedule_from_name(options.lr_schedule),
               options.lr,
               options.warmup_steps,
               run_.range.total_steps};
  if (run_.job.precision == "fp16") {
    scaler_ = LossScaler({options.init_scale,
                          options.growth_factor,
                          options.backoff_factor,
                          options.growth_interval});
  }
  if (run_.checkpoint) {
    const TrainingPosition& from = run_.checkpoint->position();
    scaler_.restore(from.loss_scale, from.finite_steps);
    skipped_ = from.skipped;
  }
  if (rank_ == 0) {
    if (!options.metrics.empty()) {
      metrics_ = std::make_unique<MetricsFile>(options.metrics,
                                               run_.checkpoint ? run_.range.first_step : -1);
    }
    progress_ = std::make_unique<Progress>(run_.range.total_steps);
  }
  if (!options.trace.empty()) {
    trace_ = std::make_unique<RunTrace>(options.trace, run_.plan, world_);
    executor_.set_trace(&trace_->recorder());
  }
  DataLoader loader(run_.job.dataset,
                    run_.job.bindings,
                    loader_options(true),
                    [&](int64_t samples) -> const std::vector<MicroBatch>& {
                      return compiled_.micro_batches(samples);
                    });
  const Clock::time_point begin = Clock::now();
  int64_t step = run_.range.first_step;
  int64_t position = run_.range.start;
  int64_t saved_step = run_.checkpoint ? step : -1;
  double loss = 0;
  bool stopped = false;
  while (const StepData* data = loader.next()) {
    const Clock::time_point start = Clock::now();
    if (step + 1 == options.profile_first) {
      device_->profile(true);
    }
    const StepResult result = run_step(*data, step);
    if (step + 1 == options.profile_last) {
      device_->profile(false);
    }
    require_items(result, concat("step ", step + 1, ": "));
    loss = result.loss();
    if (rank_ == 0) {
      report(*data, result, step, seconds_since(start));
    }
    if (trace_) {
      trace_->end_step(step + 1);
    }
    scaler_.update(result.skipped);
    skipped_ += result.skipped ? 1 : 0;
    ++step;
    position = data->position + data->num_samples;
    stopped = asked_to_stop();
    const bool due = options.checkpoint_every > 0 && step % options.checkpoint_every == 0;
    if (!options.checkpoint_dir.empty() && (due || stopped)) {
      save(step, position);
      saved_step = step;
    }
    if (stopped) {
      break;
    }
  }
  if (!options.checkpoint_dir.empty() && saved_step != step) {
    save(step, position);
    saved_step = step;
  }
  if (!options.export_file.empty() && !stopped) {
    export_model();
  }
  const std::string spent = trace_ ? trace_->finish() : "";
  if (rank_ != 0) {
    return;
  }
  progress_->finish();
  const double seconds = seconds_since(begin);
  const double samples = static_cast<double>(position - run_.range.start);
  std::printf("%s %" PRId64 " steps (%.0f samples) in %.1f s: %.0f samples/s, last loss %.6g\n",
              stopped ? "stopped after" : "trained",
              step - run_.range.first_step,
              samples,
              seconds,
              samples / std::max(seconds, 1e-9),
              loss);
  if (saved_step >= 0 && !options.checkpoint_dir.empty()) {
    std::printf("checkpoint of step %" PRId64 " in %s%s\n",
                saved_step,
                options.checkpoint_dir.c_str(),
                stopped ? "; continue with --resume" : "");
  }
  if (!options.export_file.empty() && !stopped) {
    std::printf("wrote %s\n", options.export_file.c_str());
  }
  if (trace_) {
    std::printf("%swrote %s\n", spent.c_str(), options.trace.c_str());
  }
}

// With several ranks the pieces meet in a checkpoint beside the file, which rank 0 reads.
void RankRunner::export_model() {
  const std::string parts = run_.options.export_file + ".parts";
  std::function<Tensor(const std::string&)> whole = [&](const std::string& name) {
    return store_.piece(name).data;
  };
  std::optional<Checkpoint> gathered;
  if (world_ != nullptr) {
    write_checkpoint(
        parts,
        {},
        store_.owned_names(),
        [&](const std::string& name) { return store_.piece(name); },
        world_);
  }
  if (rank_ != 0) {
    return;
  }
  if (world_ != nullptr) {
    gathered = Checkpoint::newest(parts);
    TRAINRT_CHECK(gathered.has_value());
    whole = [&](const std::string& name) { return gathered->read(name); };
  }
  // The file also has constants, which no rank holds: they stay as they are.
  const std::vector<std::string> names = gathered ? gathered->names() : store_.names();
  const std::set<std::string> held(names.begin(), names.end());
  export_trained(
      *run_.job.model,
      [&](const std::string& name) {
        if (held.count(name) == 0) {
          return Tensor();
        }
        const auto type = run_.job.model_types.find(name);
        const Tensor value = whole(name);
        return type == run_.job.model_types.end() ? value : value.cast(type->second.dtype);
      },
      run_.options.export_file);
  std::error_code ignored;
  std::filesystem::remove_all(parts, ignored);
}

StepResult RankRunner::evaluate() {
  DataLoader loader(run_.job.dataset,
                    run_.job.bindings,
                    loader_options(false),
                    [&](int64_t samples) -> const std::vector<MicroBatch>& {
                      return compiled_.micro_batches(samples);
                    });
  StepResult sum;
  int64_t step = 0;
  while (const StepData* data = loader.next()) {
    const StepResult result = run_step(*data, step++);
    sum.loss_sum += result.loss_sum;
    sum.item_count += result.item_count;
    sum.correct += result.correct;
    sum.has_correct = result.has_correct;
    if (asked_to_stop()) {
      break;
    }
  }
  return sum;
}

int64_t num_parameters(const Program& program) {
  int64_t count = 0;
  for (const Value& value : program.variants.at(0).graph.values()) {
    count += value.kind == ValueKind::kParameter ? num_elements(value.type.shape) : 0;
  }
  return count;
}

void describe(const Run& run) {
  const int64_t n = run.job.dataset->num_samples();
  std::string memory;
  for (const CompiledRank& rank : run.ranks) {
    if (!rank.programs.empty()) {
      memory += concat(memory.empty() ? "" : " + ", rank.arena_bytes() >> 20);
    }
  }
  log_info("model ",
           run.job.model->path(),
           ": ",
           num_parameters(*run.ranks[0].programs[0]),
           " trained parameters",
           run.ranks.size() > 1 ? " on rank 0" : "",
           ", loss ",
           run.job.from_training_info ? "of the model" : run.job.spec.loss.kind,
           ", ",
           run.job.precision);
  log_info("data ",
           run.job.dataset->description(),
           ": ",
           n == kEndlessSamples ? "endless" : concat(n),
           " samples, batch ",
           run.options.batch_size,
           ", ",
           run.range.total_steps,
           " steps in all");
  log_info("plan ",
           run.plan.data_parallel,
           " data x ",
           run.plan.tensor_parallel,
           " tensor x ",
           run.plan.pipeline_parallel,
           " pipeline, ",
           run.devices[0].threads,
           " threads per rank, ",
           memory,
           " MiB");
}

// A folder with checkpoints is continued or refused: nothing is overwritten by accident.
std::optional<Checkpoint> open_checkpoint(const Options& options,
                                          const TrainingJob& job,
                                          bool has_rank_zero) {
  if (options.checkpoint_dir.empty()) {
    return std::nullopt;
  }
  if (!options.resume) {
    const std::vector<int64_t> steps = checkpoint_steps(options.checkpoint_dir);
    TRAINRT_REQUIRE(steps.empty(),
                    kInvalidArgument,
                    "--checkpoint-dir '",
                    options.checkpoint_dir,
                    "' already holds a checkpoint of step ",
                    steps.back(),
                    "; continue it with --resume, or choose another folder");
    return std::nullopt;
  }
  if (has_rank_zero) {
    remove_unfinished_checkpoints(options.checkpoint_dir);
  }
  std::optional<Checkpoint> checkpoint = Checkpoint::newest(options.checkpoint_dir);
  if (!checkpoint) {
    log_warning(
        "no complete checkpoint in '", options.checkpoint_dir, "': starting from the model");
    return std::nullopt;
  }
  TRAINRT_REQUIRE(checkpoint->position().model_hash == job.model->hash(),
                  kInvalidArgument,
                  "checkpoint '",
                  checkpoint->path(),
                  "' is of another model than '",
                  job.model->path(),
                  "'");
  log_info("resuming from ", checkpoint->path());
  return checkpoint;
}

// Flags that contradict each other, before any file is read.
void check_flags(const Options& options) {
  TRAINRT_REQUIRE(!options.steps || !options.epochs,
                  kInvalidArgument,
                  "--steps and --epochs both say how long to train; give one");
  const auto refuse = [](bool asked, const std::string& flag, const std::string& instead) {
    TRAINRT_REQUIRE(!asked, kInvalidArgument, flag, " is not carried out by this build; ", instead);
  };
  refuse(options.max_tokens > 0, "--max-tokens", "use --batch-size");
  refuse(options.rebalance, "--rebalance", "give each rank its part with --shares");
  const bool has_folder = !options.checkpoint_dir.empty();
  TRAINRT_REQUIRE(
      has_folder || !options.resume, kInvalidArgument, "--resume wants --checkpoint-dir DIR");
  TRAINRT_REQUIRE(has_folder || options.checkpoint_every == 0,
                  kInvalidArgument,
                  "--checkpoint-every wants --checkpoint-dir DIR");
}

// Outputs that cannot be written are told before the work, not after it.
void check_outputs(const Options& options) {
  if (!options.export_file.empty()) {
    require_writable(options.export_file, "--export");
  }
  if (!options.metrics.empty()) {
    require_writable(options.metrics, "--metrics");
  }
  if (!options.trace.empty()) {
    require_writable(options.trace, "--trace");
  }
  if (!options.checkpoint_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.checkpoint_dir, error);
    TRAINRT_REQUIRE(!error,
                    kIo,
                    "cannot create --checkpoint-dir '",
                    options.checkpoint_dir,
                    "': ",
                    error.message());
    require_writable(options.checkpoint_dir + "/manifest.json", "--checkpoint-dir");
  }
}

Run prepare(const Options& options, bool evaluate, Ranks& ranks) {
  check_flags(options);
  const std::vector<DeviceOptions> devices = rank_devices(
      options, {ranks.num_processes(), ranks.num_local_processes(), ranks.local_rank()});
  if (devices[0].cuda_index && ranks.num_processes() > 1) {
    const size_t own = static_cast<size_t>(*devices[0].cuda_index);
    ranks.differ("GPU", cuda_module().devices().at(own).uuid);
  }
  Run run{options, make_training_job(options, evaluate), devices, {}, {}, {}, {}, {}, 0};
  run.only_rank = ranks.only_rank();
  int64_t first_step = 0, position = 0;
  if (!evaluate) {
    run.checkpoint = open_checkpoint(options, run.job, ranks.has_rank_zero());
    if (run.checkpoint) {
      first_step = run.checkpoint->position().step;
      position = run.checkpoint->position().position;
    }
  }
  run.plan = choose_plan(options, run.job, run.devices);
  run.range = step_range(options, run.job.dataset->num_samples(), first_step, position);
  std::vector<int64_t> sizes = run.range.sizes;
  if (sizes.empty()) {
    sizes = {options.batch_size};  // nothing left to do but to export
  }
  ranks.agree(start_facts(options, run.job, run.plan, first_step));
  run.ranks = compile_ranks(run.job, run.plan, run.devices, sizes, run.only_rank);
  if (ranks.has_rank_zero()) {
    describe(run);
  }
  return run;
}

}  // namespace

int train(const Options& options) {
  return with_ranks(options, [&](Ranks& ranks) { return train_ranks(options, ranks); });
}

int train_ranks(const Options& options, Ranks& ranks) {
  if (options.is_given("config") || options.is_given("set")) {
    log_info(
        "configuration:\n",
        resolved_config(options, kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions));
  }
  catch_stop_signals();
  check_outputs(options);
  Run run = prepare(options, false, ranks);
  ranks.run(static_cast<int>(run.ranks.size()),
            [&](int rank, Communicator* world) { RankRunner(run, rank, world).train(); });
  return run.exit_code;
}

int evaluate(const Options& options) {
  return with_ranks(options, [&](Ranks& ranks) {
    catch_stop_signals();
    Run run = prepare(options, true, ranks);
    StepResult sum;
    ranks.run(static_cast<int>(run.ranks.size()), [&](int rank, Communicator* world) {
      const StepResult result = RankRunner(run, rank, world).evaluate();
      if (rank == 0) {
        sum = result;
      }
    });
    if (run.exit_code == 0 && ranks.has_rank_zero()) {
      require_items(sum, "");
      write_result(eval_result(sum, options.format == "json"), options);
    }
    return run.exit_code;
  });
}

}  // namespace trainrt
