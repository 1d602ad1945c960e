#include "runtime/start_facts.h"

#include <nlohmann/json.hpp>
#include <set>

namespace trainrt {

namespace {

const std::set<std::string> kMayDiffer = {"data",
                                          "devices",
                                          "cluster",
                                          "plan",
                                          "threads",
                                          "nproc",
                                          "checkpoint-dir",
                                          "checkpoint-keep",
                                          "export",
                                          "metrics",
                                          "trace",
                                          "config",
                                          "set",
                                          "output-file",
                                          "format"};

}  // namespace

Facts start_facts(const Options& options,
                  const TrainingJob& job,
                  const Plan& plan,
                  int64_t first_step) {
  Facts facts = {{"the model (its hash)", job.model->hash()}};
  constexpr unsigned kGroups = kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions;
  for (const OptionDef& option : option_table()) {
    if ((option.groups & kGroups) != 0 && kMayDiffer.count(option.name) == 0 && option.get) {
      facts.emplace_back("--" + option.name, shown_setting(option.get(options)));
    }
  }
  facts.emplace_back("the number of samples", concat(job.dataset->num_samples()));
  facts.emplace_back("the step to begin with", concat(first_step));
  const nlohmann::ordered_json fields = nlohmann::ordered_json::parse(plan_to_json(plan));
  for (const auto& [name, value] : fields.items()) {
    facts.emplace_back("the plan's " + name, shown_setting(value.dump()));
  }
  return facts;
}

}  // namespace trainrt
