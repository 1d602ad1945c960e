#include "runtime/given_plan.h"

#include <algorithm>

#include "graph/base/json.h"
#include "parallel/plan_annotation.h"
#include "runtime/file_bytes.h"
#include "runtime/training_job.h"

namespace trainrt {

bool GivenPlan::is_whole() const {
  constexpr const char* kDecisions[] = {"global_batch",
                                        "micro_batch_size",
                                        "data_parallel",
                                        "tensor_parallel",
                                        "pipeline_parallel",
                                        "virtual_stages",
                                        "schedule",
                                        "zero_stage",
                                        "sequence_parallel",
                                        "shares",
                                        "stages",
                                        "stages.recompute",
                                        "placements"};
  return std::all_of(std::begin(kDecisions), std::end(kDecisions), [&](const char* key) {
    return stated.count(key) != 0;
  });
}

std::optional<GivenPlan> plan_file(const Options& options) {
  if (options.plan.empty() || options.plan == kNoPlan) {
    return std::nullopt;
  }
  const std::vector<std::byte> bytes = read_file(options.plan);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  // A report of `trainrt plan --format json` has the plan in it.
  const nlohmann::ordered_json report = parse_json(text, concat("--plan '", options.plan, "'"));
  if (report.is_object() && report.contains("feasible")) {
    TRAINRT_REQUIRE(report["feasible"] == true && report.contains("plan"),
                    kInvalidArgument,
                    "--plan '",
                    options.plan,
                    "' is the report of a search that found no plan; its remedies say what fits");
    text = report["plan"].dump();
  }
  try {
    Plan plan = plan_from_json(text);
    return GivenPlan{
        std::move(plan), stated_plan_keys(text), concat("--plan '", options.plan, "'")};
  } catch (Error& error) {
    error.add_context("in --plan '" + options.plan + "'");
    throw;
  }
}

std::optional<GivenPlan> carried_plan(const Options& options, const OnnxModel& model) {
  if (!options.plan.empty()) {
    return std::nullopt;
  }
  const std::optional<AnnotatedPlan> annotated = plan_of_annotation(model);
  if (!annotated) {
    return std::nullopt;
  }
  const std::string where =
      concat("the plan that '", options.arguments[0], "' carries (--plan none leaves it out)");
  if (annotated->whole) {
    return GivenPlan{annotated->plan, stated_plan_keys(plan_to_json(annotated->plan)), where};
  }
  // Others' annotations say degrees, stages and placements, and nothing of recomputation.
  std::set<std::string> stated = {"data_parallel", "pipeline_parallel"};
  if (annotated->plan.tensor_parallel > 1) {
    stated.insert("tensor_parallel");
  }
  return GivenPlan{annotated->plan, stated, where};
}

Options follow_plan(Options options, const GivenPlan& given) {
  const Plan& plan = given.plan;
  const auto same = [&](bool equal, const std::string& flag, const auto& value) {
    TRAINRT_REQUIRE(equal,
                    kInvalidArgument,
                    flag,
                    " contradicts ",
                    given.where,
                    ", which is for ",
                    value,
                    "; leave out one of them");
  };
  if (plan.global_batch > 0) {
    same(!options.is_given("batch-size") || options.batch_size == plan.global_batch,
         concat("--batch-size ", options.batch_size),
         plan.global_batch);
    options.batch_size = plan.global_batch;
  }
  if (given.stated.count("precision") != 0) {
    same(!options.is_given("precision") || options.precision == "auto" ||
             options.precision == plan.precision,
         "--precision " + options.precision,
         plan.precision);
    options.precision = plan.precision;
  }
  const std::map<std::string, int64_t> dims = bind_options(options, true).dims;
  for (const auto& [dim, size] : plan.bind) {
    const auto flag = dims.find(dim);
    same(flag == dims.end() || flag->second == size,
         concat("--bind ", dim, "=", flag == dims.end() ? 0 : flag->second),
         size);
    if (flag == dims.end()) {
      options.bind.push_back(concat(dim, "=", size));
    }
  }
  const auto follow = [&](const char* key, const char* flag, auto Options::*field, auto value) {
    if (given.stated.count(key) != 0) {
      same(!options.is_given(flag) || options.*field == value,
           concat("--", flag, " ", options.*field),
           value);
      options.*field = value;
    }
  };
  follow("reduction",
         "reduction",
         &Options::reduction,
         std::string(plan.exact_reduction ? "exact" : "fast"));
  follow("logical_shards", "logical-shards", &Options::logical_shards, plan.logical_shards);
  follow("batch_norm",
         "batch-norm",
         &Options::batch_norm,
         std::string(plan.sync_batch_norm ? "sync" : "local"));
  if (given.stated.count("offload") != 0) {
    same(!options.is_given("offload") || (options.offload == "optimizer") == plan.offload_optimizer,
         "--offload " + options.offload,
         plan.offload_optimizer ? "optimizer" : "none");
    options.offload = plan.offload_optimizer ? "optimizer" : "none";
  }
  return options;
}

void pin_given_plan(const GivenPlan& given,
                    const std::string& model_hash,
                    const Topology& topology,
                    PlanPins* pins) {
  TRAINRT_REQUIRE(given.plan.model_hash.empty() || given.plan.model_hash == model_hash,
                  kInvalidArgument,
                  given.where,
                  " is made for another model (hash ",
                  given.plan.model_hash,
                  ", this model has ",
                  model_hash,
                  ")");
  pin_plan(given.plan, given.stated, given.where, topology, pins);
}

}  // namespace trainrt
