#include "runtime/trainer.h"

#include "graph/base/log.h"
#include "graph/onnx_weight_files.h"
#include "runtime/commands/command.h"
#include "runtime/describe.h"
#include "runtime/eval_result.h"
#include "runtime/file_bytes.h"
#include "runtime/given_plan.h"
#include "runtime/load_cuda.h"
#include "runtime/option_checks.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_devices.h"
#include "runtime/rank_runner.h"
#include "runtime/ranks.h"
#include "runtime/resume.h"
#include "runtime/signals.h"
#include "runtime/start_facts.h"

namespace trainrt {

namespace {

// Weights that are not there are told before a plan is sought for them.
void require_weights(const OnnxModel& model) {
  for (const WeightFile& missing : weight_files(model)) {
    TRAINRT_REQUIRE(missing.exists,
                    kInvalidModel,
                    "the weights of '",
                    model.path(),
                    "' are not there: file '",
                    missing.name,
                    "', which holds '",
                    missing.tensors.front(),
                    "'",
                    missing.tensors.size() > 1
                        ? concat(" and ", missing.tensors.size() - 1, " more tensors")
                        : "",
                    ", does not exist; without weights a model can be planned ('trainrt plan') and "
                    "inspected");
  }
}

// What the plan file says of the problem holds where no flag says it.
Options with_plan_file(const Options& flags) {
  const std::optional<GivenPlan> given = plan_file(flags);
  return given ? follow_plan(flags, *given) : flags;
}

Run prepare(const Options& options, const TrainingSeams& seams, bool evaluate, Ranks& ranks) {
  check_flags(options);
  const Processes processes = {ranks.hosts(), ranks.only_rank().value_or(0)};
  const std::vector<DeviceOptions> devices = run_devices(options, processes);
  const std::optional<int> gpu = devices[static_cast<size_t>(processes.own_rank)].cuda_index;
  std::vector<std::string> places;  // of several processes
  if (processes.count() > 1) {
    if (gpu) {
      ranks.differ("GPU", cuda_module().devices().at(static_cast<size_t>(*gpu)).uuid);
    }
    places = ranks.exchange("place", device_place(options, processes));
  }
  ranks.set_activity("reading the model and the data");
  Run run{
      options, seams, make_training_job(options, evaluate ? JobUse::kEvaluate : JobUse::kTrain)};
  require_weights(*run.job.model);
  run.only_rank = ranks.only_rank();
  int64_t first_step = 0, position = 0;
  if (!evaluate) {
    run.checkpoint = open_checkpoint(options, run.job, ranks.has_rank_zero());
    if (run.checkpoint) {
      run.tensors = compare_tensors(*run.checkpoint, run.job);
      run.job.checkpoint = run.checkpoint;
      run.job.example.reset();  // its frozen weights are those of the file
      if (!run.tensors.fresh.empty() && ranks.has_rank_zero()) {
        log_info("not trained so far: ",
                 run.tensors.fresh.size(),
                 " tensors such as '",
                 *run.tensors.fresh.begin(),
                 "'; they begin as in the model");
      }
      first_step = run.checkpoint->position().step;
      position = run.checkpoint->position().position;
    }
  }
  ranks.set_activity("planning");
  run.plan = choose_plan(options, run.job, devices, places);
  run.devices = devices_of_ranks(options, run.plan, devices, places);
  if (run.checkpoint) {
    require_update_rule(*run.checkpoint, run.plan);
  }
  if (!evaluate && ranks.has_rank_zero()) {
    warn_of_idle_pins(options, run.plan);
  }
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

int train_ranks(const Options& flags, Ranks& ranks, const TrainingSeams& seams) {
  const Options options = with_plan_file(flags);
  if (options.is_given("config") || options.is_given("set")) {
    log_info(
        "configuration:\n",
        resolved_config(options, kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions));
  }
  catch_stop_signals();
  check_outputs(options);
  std::optional<FolderLock> lock;
  if (!options.checkpoint_dir.empty() && ranks.has_rank_zero()) {
    lock.emplace(options.checkpoint_dir, "--checkpoint-dir");
  }
  Run run = prepare(options, seams, false, ranks);
  defer_stop_signals();
  ranks.run(static_cast<int>(run.ranks.size()),
            [&](int rank, Communicator* world) { RankRunner(run, rank, world).train(); });
  return run.exit_code;
}

int evaluate(const Options& flags) {
  return with_ranks(flags, [&](Ranks& ranks) {
    const Options options = with_plan_file(flags);
    catch_stop_signals();
    const TrainingSeams none;
    Run run = prepare(options, none, true, ranks);
    defer_stop_signals();
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
