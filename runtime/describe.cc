#include "runtime/describe.h"

#include <algorithm>

#include "graph/base/log.h"
#include "runtime/frozen_norms.h"

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

std::string rate_text(const Options& options) {
  return concat(
      "lr ",
      options.lr,
      " ",
      options.lr_schedule,
      options.warmup_steps > 0 ? concat(" after ", options.warmup_steps, " warm-up steps") : "");
}

// The settings of the update, resolved: the defaults too.
std::string training_text(const Run& run) {
  const Options& options = run.options;
  if (run.job.from_training_info) {
    return concat("as the model's training_info says",
                  run.job.reads_learning_rate ? concat(", ", rate_text(options)) : "",
                  ", seed ",
                  options.seed);
  }
  const OptimizerSpec& optimizer = run.job.spec.optimizer;
  const bool adaptive =
      optimizer.name == "adam" || optimizer.name == "adamw" || optimizer.name == "lamb";
  std::string text = concat(optimizer.name, ", ", rate_text(options));
  text += concat(", weight decay ", optimizer.weight_decay);
  if (optimizer.name == "momentum") {
    text += concat(", momentum ", optimizer.momentum, optimizer.nesterov ? " (Nesterov)" : "");
  }
  text += adaptive ? concat(", beta1 ", optimizer.beta1, ", beta2 ", optimizer.beta2) : "";
  text += adaptive || optimizer.name == "adagrad" ? concat(", eps ", optimizer.eps) : "";
  text += optimizer.clip_norm > 0 ? concat(", clip norm ", optimizer.clip_norm) : ", no clipping";
  return text + concat(", seed ", options.seed);
}

std::string recompute_text(const Plan& plan) {
  const std::vector<PlanStage>& stages = plan.stages;
  const bool alike = std::all_of(stages.begin(), stages.end(), [&](const PlanStage& stage) {
    return stage.recompute == stages[0].recompute && stage.recompute_runs.empty();
  });
  const bool any = std::any_of(
      stages.begin(), stages.end(), [](const PlanStage& stage) { return stage.recomputes(); });
  return !any ? ""
              : concat(", recompute ",
                       alike ? recompute_name(stages[0].recompute) : "of some blocks");
}

std::string plan_text(const Run& run) {
  const Plan& plan = run.plan;
  std::string text = concat(plan.data_parallel,
                            " data x ",
                            plan.tensor_parallel,
                            " tensor x ",
                            plan.pipeline_parallel,
                            " pipeline, micro-batch ",
                            plan.micro_batch_size);
  const bool rebalances = run.options.rebalance && plan.data_parallel > 1;
  if (plan.pipeline_parallel > 1) {
    text += concat(", ", schedule_name(plan.schedule));
    for (const CompiledRank& rank : run.ranks) {
      if (goes_on(plan.schedule) && !run.job.evaluate && !rank.programs.empty() &&
          (!rank.programs[0]->runs_on() || rebalances)) {
        text += " (drains at the end of each step)";
        break;
      }
    }
  }
  text += recompute_text(plan);
  text += plan.zero_stage > 0 ? concat(", zero ", plan.zero_stage) : "";
  text += plan.exact_reduction ? ", exact reduction" : "";
  return text + (plan.sync_batch_norm ? ", batch norm sync" : "");
}

bool has_batch_statistics(const Run& run) {
  for (const CompiledRank& rank : run.ranks) {
    for (const auto& program : rank.programs) {
      for (const Node& node : program->variants.at(0).graph.nodes()) {
        if (node.op_type == "BatchNormMoments") {
          return true;
        }
      }
    }
  }
  return false;
}

void warn_of_frozen_norms(const Run& run) {
  const std::vector<std::string>& names = run.job.frozen_norms;
  if (!run.job.evaluate && !names.empty()) {
    log_warning(frozen_norms_text(names));
  }
}

// What changes the result without being asked for.
void warn_of_small_batches(const Run& run) {
  const int64_t n = run.job.dataset->num_samples();
  const int64_t batch = run.options.batch_size;
  if (batch > n) {
    log_warning("--batch-size ",
                batch,
                " is larger than the data (",
                n,
                " samples): every step takes all of them");
  }
  if (!run.job.evaluate && !run.plan.sync_batch_norm &&
      run.plan.micro_batch_size < std::min(batch, n) && has_batch_statistics(run)) {
    log_warning("BatchNorm's statistics are those of micro-batches of ",
                run.plan.micro_batch_size,
                " samples, not of the batch of ",
                std::min(batch, n),
                "; --micro-batch-size changes the result");
  }
}

}  // namespace

void describe(const Run& run) {
  const int64_t n = run.job.dataset->num_samples();
  std::string memory;  // of several processes rank 0 knows its own alone
  for (const CompiledRank& rank : run.ranks) {
    if (!rank.programs.empty()) {
      memory += (memory.empty() ? "" : " + ") + bytes_text(rank.arena_bytes());
    }
  }
  memory += run.only_rank ? " on rank 0" : "";
  log_info("model ",
           run.job.model->path(),
           ": ",
           num_parameters(*run.ranks[0].programs[0]),
           " trained parameters",
           run.ranks.size() > 1 ? " on rank 0" : "",
           ", loss ",
           run.job.from_training_info ? "of the model" : run.job.spec.loss.kind,
           !run.job.from_training_info && run.job.spec.loss.kind == "output"
               ? ":" + run.job.spec.loss.output
               : "",
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
  if (!run.job.evaluate) {
    log_info("train ", training_text(run));
  }
  log_info("plan ", plan_text(run), ", ", run.devices[0].threads, " threads per rank, ", memory);
  warn_of_frozen_norms(run);
  warn_of_small_batches(run);
}

}  // namespace trainrt
