// The part of a rank that carries out --rebalance. What the Rebalancer decides needs no agreement:
// it is told the same by all ranks. Whether it fits is asked of all of them, and only then do they
// go on with other programs.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "graph/base/log.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_runner.h"

namespace trainrt {

namespace {

// Of --max-tokens, where work is dealt out by weight: into how many parts a step is thought cut.
constexpr double kTokenUnits = 1000;

std::string list(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) {
    text += concat(text.empty() ? "" : ", ", value);
  }
  return text;
}

}  // namespace

std::unique_ptr<Rebalancer> RankRunner::make_rebalancer() const {
  if (!run_.options.rebalance) {
    return nullptr;
  }
  if (plan_.data_parallel == 1) {
    log_warning("--rebalance: the plan has one data rank, so there is nothing to balance");
    return nullptr;
  }
  const bool whole_shares =
      std::all_of(plan_.shares.begin(), plan_.shares.end(), [](const DataShare& share) {
        return share.num_micro_batches <= 1;
      });
  if (!run_.job.token_batches && run_.options.micro_batch_size > 0 && whole_shares) {
    log_warning(
        "--rebalance: each data rank has one micro-batch of the size given, so there is "
        "nothing to move; make --micro-batch-size smaller or leave it out");
    return nullptr;
  }
  if (!run_.job.token_batches) {
    // 2BW needs a micro-batch for each stage.
    const int64_t least = plan_.schedule == ScheduleKind::k2BW ? plan_.pipeline_parallel : 1;
    const std::vector<int64_t> units = share_units(plan_);
    int64_t spare = 0;
    for (const int64_t own : units) {
      spare += std::max<int64_t>(0, own - least);
    }
    if (spare < 2) {
      log_warning("--rebalance: the data ranks' shares are ",
                  list(units),
                  plan_.exact_reduction ? " logical shards" : " micro-batches",
                  " and each keeps ",
                  least,
                  ", so there is ",
                  spare == 0 ? "nothing" : "but one",
                  " to move; make ",
                  plan_.exact_reduction ? "--logical-shards larger" : "--micro-batch-size smaller");
    }
    return spare > 0 ? std::make_unique<Rebalancer>(units, least) : nullptr;
  }
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  std::vector<int64_t> units;
  for (const double weight : weights_) {
    units.push_back(std::llround(kTokenUnits * weight / sum));
  }
  return std::make_unique<Rebalancer>(units, 1);
}

// A data rank is as slow as the slowest of its stages and tensor ranks.
std::vector<double> RankRunner::seconds_of_data_ranks(const StepData& data, int64_t step) {
  double own = executor_.compute_seconds();
  if (run_.seams.compute_seconds) {
    int64_t work = 0;
    for (const MicroBatch& micro_batch : data.work.micro_batches) {
      work += run_.job.token_batches
                  ? padded_tokens(micro_batch, run_.job.token_batches->lengths().width)
                  : micro_batch.num_samples;
    }
    own = run_.seams.compute_seconds(rank_, step, work);
  }
  std::vector<double> by_rank(run_.devices.size(), own);
  world_->all_gather(
      &own, by_rank.data(), std::vector<int64_t>(by_rank.size(), 1), DType::kFloat64);
  std::vector<double> seconds(static_cast<size_t>(plan_.data_parallel), 0.0);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    double& most =
        seconds[static_cast<size_t>(rank_coordinates(plan_, static_cast<int>(rank)).data_rank)];
    most = std::max(most, by_rank[rank]);
  }
  return seconds;
}

std::optional<std::vector<int64_t>> RankRunner::new_units(const StepData& data, int64_t step) {
  if (!rebalancer_ || data.num_samples != run_.options.batch_size) {
    return std::nullopt;  // a short step has its own proportions
  }
  std::vector<double> seconds = seconds_of_data_ranks(data, step);
  for (size_t rank = 0; rank < data.padded_tokens.size(); ++rank) {
    // As if each rank had had exactly its weight of the tokens.
    const int64_t tokens = data.padded_tokens[rank];
    if (rebalancer_->units()[rank] > 0 && tokens == 0) {
      return std::nullopt;
    }
    seconds[rank] *= static_cast<double>(rebalancer_->units()[rank]) /
                     static_cast<double>(std::max<int64_t>(1, tokens));
  }
  return rebalancer_->observe(seconds);
}

// By data rank: whether one of its ranks has less memory than `compiled` needs.
std::vector<bool> RankRunner::lacking_memory(const CompiledRank& compiled) {
  const std::optional<int64_t> limit = run_.devices[static_cast<size_t>(rank_)].memory_limit;
  const int64_t own = limit && compiled.arena_bytes() > *limit ? 1 : 0;
  std::vector<int64_t> by_rank(run_.devices.size(), own);
  world_->all_gather(&own, by_rank.data(), std::vector<int64_t>(by_rank.size(), 1), DType::kInt64);
  std::vector<bool> over(static_cast<size_t>(plan_.data_parallel), false);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] != 0) {
      over[static_cast<size_t>(rank_coordinates(plan_, static_cast<int>(rank)).data_rank)] = true;
    }
  }
  return over;
}

void RankRunner::take_units(std::optional<std::vector<int64_t>> units, int64_t step) {
  const std::vector<int64_t> before = rebalancer_->units();
  while (units && !run_.job.token_batches) {
    const Plan plan = reshare_plan(plan_, *units);
    CompiledRank compiled;
    {
      const std::lock_guard lock(*run_.compiling);
      compiled = std::move(compile_ranks(run_.job, plan, run_.devices, run_.sizes, rank_)
                               .at(static_cast<size_t>(rank_)));
    }
    const std::vector<bool> over = lacking_memory(compiled);
    if (std::find(over.begin(), over.end(), true) == over.end()) {
      reshare(std::move(compiled), plan);
      break;
    }
    units = rebalancer_->reject(over);
  }
  if (!units) {
    return;
  }
  if (run_.job.token_batches) {
    weights_.assign(units->begin(), units->end());
  }
  if (rank_ == 0) {
    log_info("rebalanced after step ",
             step,
             ": shares ",
             list(before),
             " become ",
             list(*units),
             ", the slowest rank's work should take ",
             static_cast<int>(100 * rebalancer_->promised() + 0.5),
             " % of the time");
  }
  rebalancer_->adopt(*units);
}

void RankRunner::reshare(CompiledRank compiled, Plan plan) {
  executor_.replace_programs(compiled.programs, compiled.memories);
  compiled_ = std::move(compiled);
  plan_ = std::move(plan);
  gather_peaks();
}

}  // namespace trainrt
