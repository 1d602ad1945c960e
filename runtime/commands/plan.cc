// `trainrt plan`: the dry-run report.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "graph/base/log.h"
#include "parallel/plan_annotation.h"
#include "parallel/trace_events.h"
#include "planner/plan_report.h"
#include "runtime/commands/command.h"
#include "runtime/commands/plan_flags.h"
#include "runtime/file_bytes.h"
#include "runtime/given_plan.h"
#include "runtime/option_checks.h"
#include "runtime/plan_choice.h"
#include "runtime/rank_devices.h"
#include "runtime/training_job.h"

namespace trainrt {

namespace {

// auto: fp32 on CPUs, bf16 where the devices have it, else fp16.
std::string precision_of(const Options& options, const Topology& topology) {
  std::string precision = options.precision;
  if (precision == "auto") {
    precision = "bf16";
    for (const DeviceType& type : topology.types) {
      if (type.is_cpu()) {
        return "fp32";
      }
      precision = type.flops.count("bf16") != 0 ? precision : "fp16";
    }
  }
  for (const DeviceType& type : topology.types) {
    type.peak_flops(precision);  // or says which device lacks it
  }
  return precision;
}

// The graph does not depend on the precision: the planner prices 16-bit numbers itself.
Options job_options(const Options& options) {
  Options changed = options;
  changed.precision = options.precision == "fp64" ? "fp64" : "fp32";
  changed.micro_batch_size = options.micro_batch_size > 0 ? options.micro_batch_size : 1;
  return changed;
}

Objective objective_of(const std::string& name) {
  return name == "memory"    ? Objective::kMemory
         : name == "devices" ? Objective::kDevices
         : name == "cost"    ? Objective::kCost
                             : Objective::kThroughput;
}

// The job as it would be run: in the precision itself.
TrainingJob job_in(TrainingJob job, const std::string& precision) {
  job.precision = precision;
  return job;
}

// A predicted time line: of all ranks where their programs were replayed, else of data rank 0, a
// line per pipeline rank. What lies between two cells is a bubble, transfers that nobody waits for
// included.
struct PredictedRank {
  std::string label;
  std::vector<TraceEvent> events;
};

std::vector<PredictedRank> predicted_ranks(const Timeline& timeline) {
  std::vector<PredictedRank> ranks;
  for (size_t rank = 0; rank < timeline.events.size(); ++rank) {
    ranks.push_back({concat("rank ", rank, " (predicted)"), timeline.events[rank]});
  }
  if (!ranks.empty()) {
    return ranks;
  }
  for (size_t rank = 0; rank < timeline.schedule.ranks.size(); ++rank) {
    PredictedRank made{concat("stage ", rank, " (predicted)"), {}};
    double end = 0;
    for (size_t i = 0; i < timeline.schedule.ranks[rank].size(); ++i) {
      const CellTime& time = timeline.replay.cells[rank][i];
      if (time.start > end) {
        made.events.push_back({"wait", TraceLane::kBubble, end, time.start - end, 1, -1});
      }
      end = time.end;
      made.events.push_back({cell_name(timeline.schedule.ranks[rank][i]),
                             TraceLane::kCompute,
                             time.start,
                             time.end - time.start,
                             1,
                             -1});
    }
    ranks.push_back(std::move(made));
  }
  return ranks;
}

// Written as `run --trace` writes the measured steps, and summed up as there: of each rank's time
// from its first event to its last.
void write_predicted_trace(const Timeline& timeline, const std::string& file) {
  std::string text = kTraceBegin, spent;
  const std::vector<PredictedRank> ranks = predicted_ranks(timeline);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    text += trace_rank_lines(static_cast<int>(rank), ranks[rank].label);
    TraceTotals totals;
    double begin = std::numeric_limits<double>::max(), end = 0;
    for (const TraceEvent& event : ranks[rank].events) {
      text += trace_line(static_cast<int>(rank), event);
      totals.add(event);
      begin = std::min(begin, event.start_seconds);
      end = std::max(end, event.start_seconds + event.seconds);
    }
    spent += totals.line(ranks[rank].label, end - begin);
  }
  write_file_atomically(file, [&](std::ostream& out) { out << text << kTraceEnd; });
  log_info(spent, "wrote ", file);
}

// What the search frees it soon needs again.
void keep_freed_memory() {
  constexpr int kPad = 64 << 20, kMost = 1 << 30;
  ::mallopt(M_TOP_PAD, kPad);
  ::mallopt(M_TRIM_THRESHOLD, kMost);
  ::mallopt(M_MMAP_THRESHOLD, kMost);
}

// Where the process ends soon, which frees memory at once and not piece by piece.
template <typename T>
T& left_to_the_system(T value) {
  static auto& left = *new std::vector<std::shared_ptr<void>>;
  left.push_back(std::make_shared<T>(std::move(value)));
  return *static_cast<T*>(left.back().get());
}

// Nobody may have asked for the second size; but nothing may be at work when the process ends.
class WaitForSecondSize {
 public:
  explicit WaitForSecondSize(const TrainingJob& job) : job_(job) {}
  ~WaitForSecondSize() {
    if (job_.forward_of_two.valid()) {
      job_.forward_of_two.wait();
    }
  }
  WaitForSecondSize(const WaitForSecondSize&) = delete;
  WaitForSecondSize& operator=(const WaitForSecondSize&) = delete;

 private:
  const TrainingJob& job_;
};

int plan_command(const Options& flags) {
  check_flags(flags);
  keep_freed_memory();
  const auto begin = std::chrono::steady_clock::now();
  PlanRequest request;
  request.topology = planned_topology(flags);
  std::optional<GivenPlan> given = plan_file(flags);
  Options options = given ? follow_plan(flags, *given) : flags;
  request.precision = precision_of(options, request.topology);
  TrainingJob& job = left_to_the_system(make_training_job(job_options(options), JobUse::kPlan));
  const WaitForSecondSize waits(job);
  if (!given) {
    given = carried_plan(options, *job.model);
    if (given) {
      options = follow_plan(flags, *given);
      request.precision = precision_of(options, request.topology);
      const bool same_graph = options.bind == flags.bind &&
                              job_options(options).precision == job_options(flags).precision;
      if (!same_graph) {
        job = make_training_job(job_options(options), JobUse::kPlan);
      }
    }
  }
  std::once_flag warned;
  const auto trained = [&warned](TrainingGraph training) {
    std::call_once(warned, [&] { warn_of_no_influence(training.without_influence); });
    return training;
  };
  request.model.training = [&](int64_t micro_batch) {
    return trained(job.build({micro_batch, 0}, true));
  };
  if (!job.from_training_info) {
    request.model.forward = remembered([&job](int64_t micro_batch) {
      return micro_batch == job.example_micro_batch && job.example_forward ? job.example_forward
             : micro_batch == 2 && job.forward_of_two.valid()
                 ? job.forward_of_two.get()
                 : std::make_shared<const Graph>(job.forward({micro_batch, 0}));
    });
    request.model.train = [&](Graph forward, int64_t micro_batch) {
      return trained(job.build_from(std::move(forward), {micro_batch, 0}, true));
    };
  }
  const TrainingJob programs = job_in(job, request.precision);
  request.programs = [&programs](int64_t micro_batch, bool accumulate) {
    return programs.build({micro_batch, 0}, accumulate);
  };
  if (!job.from_training_info) {
    request.program_source.forward = request.model.forward;
    if (request.precision != job.precision) {
      request.model.train_as_run = [&programs](Graph forward, int64_t micro_batch) {
        return programs.build_from_full(forward, {micro_batch, 0}, true);
      };
    }
    request.program_source.train = [&programs](
                                       Graph forward, int64_t micro_batch, bool accumulate) {
      return programs.build_from_full(forward, {micro_batch, 0}, accumulate);
    };
  }
  request.device_spec = [&](const Topology& topology, int device) {
    return planned_device_spec(options, topology, device);
  };
  request.num_nodes = job.num_forward_nodes;
  request.global_batch = options.batch_size;
  request.model_hash = job.model->hash();
  request.bind = job.bind.dims;
  request.pins = plan_pins(options);
  if (job.token_batches) {
    request.pins.micro_batch = job.token_batches->largest_micro_batch();
    log_info("--max-tokens: priced as if every sample had the most tokens");
  }
  if (given) {
    pin_given_plan(*given, request.model_hash, request.topology, &request.pins);
  }
  constexpr int64_t kQuickSearch = 10000;
  request.what_if_candidates = options.what_if == "on"    ? std::numeric_limits<int64_t>::max()
                               : options.what_if == "off" ? 0
                                                          : kQuickSearch;
  request.objective = objective_of(options.objective);
  request.price = planned_prices(options, request.topology);
  PlanResult made = make_plan(request);
  if (made.feasible) {
    warn_of_idle_pins(options, made.plan);
  }
  if (made.feasible && options.rebalance && made.plan.data_parallel > 1 &&
      goes_on(made.plan.schedule) && made.drains_because.empty()) {
    made.drains_because =
        "--rebalance compares the ranks' times after each (not part of the step above)";
  }
  const PlanResult& result = left_to_the_system(std::move(made));
  if (!options.trace.empty()) {
    TRAINRT_REQUIRE(result.chosen.prediction.timeline != nullptr,
                    kInfeasiblePlan,
                    "--trace: there is no plan whose step could be drawn");
    write_predicted_trace(*result.chosen.prediction.timeline, options.trace);
  }
  ReportContext context;
  context.model_name = options.arguments[0].substr(options.arguments[0].rfind('/') + 1);
  context.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!options.annotate.empty()) {
    TRAINRT_REQUIRE(result.feasible,
                    kInfeasiblePlan,
                    "--annotate '",
                    options.annotate,
                    "': no plan fits, so there is none to write");
    write_annotated(*job.model, annotation_of(result.plan, *job.model), options.annotate);
  }
  write_result(options.format == "json"   ? report_json(request, result, context)
               : options.format == "html" ? report_html(request, result, context)
                                          : report_text(request, result, context),
               options);
  return result.feasible ? 0 : exit_code(ErrorCode::kInfeasiblePlan);
}

const RegisterCommand kPlan{{
    .name = "plan",
    .arguments = "MODEL.onnx",
    .summary = "how to train the model on a cluster: a dry-run report",
    .groups = kDataOptions | kTrainingOptions | kPlanOptions | kReportOptions | kFormatOptions |
              kOutputOptions | kTraceOptions,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = plan_command,
}};

}  // namespace

}  // namespace trainrt
