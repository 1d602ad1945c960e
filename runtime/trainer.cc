#include "runtime/trainer.h"

#include <filesystem>
#include <optional>

#include "graph/base/log.h"
#include "runtime/checkpoint.h"
#include "runtime/commands/command.h"
#include "runtime/eval_result.h"
#include "runtime/file_bytes.h"
#include "runtime/load_cuda.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_runner.h"
#include "runtime/ranks.h"
#include "runtime/signals.h"
#include "runtime/start_facts.h"

namespace trainrt {

namespace {

int64_t num_parameters(const Program& program) {
  int64_t count = 0;
  for (const Value& value : program.variants.at(0).graph.values()) {
    count += value.kind == ValueKind::kParameter ? num_elements(value.type.shape) : 0;
  }
  return count;
}

void describe_tokens(const TokenBatches& batches) {
  std::string buckets;
  for (const int64_t length : batches.buckets()) {
    buckets += concat(buckets.empty() ? "" : ", ", length);
  }
  log_info("tokens ",
           batches.lengths().from,
           "; micro-batches of ",
           batches.shapes().size(),
           " shapes, samples padded to ",
           buckets,
           " tokens");
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
  if (run.job.token_batches) {
    describe_tokens(*run.job.token_batches);
  }
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
  TRAINRT_REQUIRE(!options.rebalance || !names_cuda(options.devices),
                  kUnsupported,
                  "--rebalance measures CPU ranks only; give GPUs their parts with --shares");
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

Run prepare(const Options& options, const TrainingSeams& seams, bool evaluate, Ranks& ranks) {
  check_flags(options);
  const std::vector<DeviceOptions> devices = rank_devices(
      options, {ranks.num_processes(), ranks.num_local_processes(), ranks.local_rank()});
  if (devices[0].cuda_index && ranks.num_processes() > 1) {
    const size_t own = static_cast<size_t>(*devices[0].cuda_index);
    ranks.differ("GPU", cuda_module().devices().at(own).uuid);
  }
  Run run{options, seams, make_training_job(options, evaluate), devices};
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
  run.sizes = run.range.sizes;
  if (run.sizes.empty()) {
    run.sizes = {options.batch_size};  // nothing left to do but to export
  }
  ranks.agree(start_facts(options, run.job, run.plan, first_step));
  run.ranks = compile_ranks(run.job, run.plan, run.devices, run.sizes, run.only_rank);
  if (ranks.has_rank_zero()) {
    describe(run);
  }
  return run;
}

}  // namespace

int train(const Options& options, const TrainingSeams& seams) {
  return with_ranks(options, [&](Ranks& ranks) { return train_ranks(options, ranks, seams); });
}

int train_ranks(const Options& options, Ranks& ranks, const TrainingSeams& seams) {
  if (options.is_given("config") || options.is_given("set")) {
    log_info(
        "configuration:\n",
        resolved_config(options, kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions));
  }
  catch_stop_signals();
  check_outputs(options);
  Run run = prepare(options, seams, false, ranks);
  ranks.run(static_cast<int>(run.ranks.size()),
            [&](int rank, Communicator* world) { RankRunner(run, rank, world).train(); });
  return run.exit_code;
}

int evaluate(const Options& options) {
  return with_ranks(options, [&](Ranks& ranks) {
    catch_stop_signals();
    const TrainingSeams none;
    Run run = prepare(options, none, true, ranks);
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
