#include "runtime/resume.h"

#include <algorithm>

#include "graph/base/log.h"

namespace trainrt {

std::map<std::string, std::string> training_settings(const Options& options,
                                                     const TrainingJob& job) {
  // How far and in which pieces is free to change; but schedules follow the length.
  std::set<std::string> left_out = {"micro-batch-size"};
  if (options.lr_schedule == "constant") {
    left_out.insert({"steps", "epochs"});
  }
  std::map<std::string, std::string> settings;
  for (const OptionDef& option : option_table()) {
    const bool trains = (option.groups & (kDataOptions | kTrainingOptions)) != 0;
    if (trains && left_out.count(option.name) == 0) {
      settings[option.name] = option.get(options);
    }
  }
  // Of the plan's, those that change the numbers of a step.
  std::vector<std::string> numeric = {"batch-norm", "reduction"};
  if (options.reduction == "exact") {
    numeric.emplace_back("logical-shards");
  }
  for (const std::string& name : numeric) {
    settings[name] = find_option(name)->get(options);
  }
  settings["precision"] = job.precision;
  settings["weight-decay"] = concat(job.spec.optimizer.weight_decay);
  settings["number of samples"] = concat(job.dataset->num_samples());
  if (const std::string alphabet = job.dataset->alphabet(); !alphabet.empty()) {
    settings["alphabet"] = alphabet;
  }
  if (job.from_training_info) {
    settings["optimizer"] = "training_info";
  }
  return settings;
}

namespace {

std::string shown(const std::string& value) {
  return value == concat(kEndlessSamples) ? "endless" : shown_setting(value);
}

void compare_settings(const std::map<std::string, std::string>& before,
                      const std::map<std::string, std::string>& now,
                      const std::string& path,
                      bool tell) {
  for (const auto& [name, value] : now) {
    const auto old = before.find(name);
    if (old == before.end() || old->second == value) {
      continue;
    }
    TRAINRT_REQUIRE(name != "optimizer",
                    kInvalidArgument,
                    "checkpoint '",
                    path,
                    "' holds the state of --optimizer ",
                    shown(old->second),
                    ", this run's is ",
                    shown(value),
                    "; continue with the same, or start anew from its --export in another "
                    "--checkpoint-dir");
    TRAINRT_REQUIRE(name != "alphabet",
                    kInvalidArgument,
                    "checkpoint '",
                    path,
                    "' numbers the characters of its text otherwise than those of this --data; "
                    "continue with the same text, or train its --export on the other one: an "
                    "exported model keeps its alphabet");
    if (name == "init-scale" && now.at("precision") == "fp16" && before.count("precision") != 0) {
      if (tell && before.at("precision") == "fp16") {
        log_info("--init-scale ", value, " has no effect: the checkpoint's loss scale goes on");
      }
      continue;
    }
    if (tell) {
      log_info("resuming with another ",
               find_option(name) != nullptr ? "--" : "",
               name,
               ": ",
               shown(old->second),
               " -> ",
               shown(value));
    }
  }
}

}  // namespace

namespace {

constexpr const char* kUpdateRule = "update rule";

std::string update_rule(const Plan& plan) {
  return goes_on(plan.schedule) ? schedule_name(plan.schedule) : "synchronous";
}

}  // namespace

void note_update_rule(const Plan& plan, std::map<std::string, std::string>& settings) {
  settings[kUpdateRule] = update_rule(plan);
}

void require_update_rule(const Checkpoint& checkpoint, const Plan& plan) {
  const auto& settings = checkpoint.position().settings;
  const auto before = settings.find(kUpdateRule);
  const std::string delayed = schedule_name(ScheduleKind::k2BW);
  TRAINRT_REQUIRE(before == settings.end() || before->second == update_rule(plan),
                  kInvalidArgument,
                  "checkpoint '",
                  checkpoint.path(),
                  "' was trained ",
                  before->second == delayed ? "with" : "without",
                  " --schedule 2bw, which updates weights by gradients of the ones before and so "
                  "trains otherwise than other schedules; this run's is ",
                  schedule_name(plan.schedule),
                  ". Continue ",
                  before->second == delayed ? "with --schedule 2bw" : "without --schedule 2bw",
                  ", or start anew from its --export in another --checkpoint-dir");
}

std::shared_ptr<const Checkpoint> open_checkpoint(const Options& options,
                                                  const TrainingJob& job,
                                                  bool tell) {
  if (options.checkpoint_dir.empty()) {
    return nullptr;
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
    return nullptr;
  }
  if (tell) {
    remove_unfinished_checkpoints(options.checkpoint_dir);
  }
  std::optional<Checkpoint> checkpoint = Checkpoint::newest(options.checkpoint_dir);
  if (!checkpoint) {
    log_warning(
        "no complete checkpoint in '", options.checkpoint_dir, "': starting from the model");
    return nullptr;
  }
  TRAINRT_REQUIRE(checkpoint->position().model_hash == job.model->hash(),
                  kInvalidArgument,
                  "checkpoint '",
                  checkpoint->path(),
                  "' is of another model than '",
                  job.model->path(),
                  "'");
  // Another seed is another order: what is left of the epoch would hold samples seen already.
  TRAINRT_REQUIRE(checkpoint->position().seed == options.seed,
                  kInvalidArgument,
                  "checkpoint '",
                  checkpoint->path(),
                  "' was trained with --seed ",
                  checkpoint->position().seed,
                  ", this run's is ",
                  options.seed,
                  ", which would change the order of the samples; continue with --seed ",
                  checkpoint->position().seed,
                  ", or start anew from its --export in another --checkpoint-dir");
  compare_settings(
      checkpoint->position().settings, training_settings(options, job), checkpoint->path(), tell);
  log_info("resuming from ", checkpoint->path());
  return std::make_shared<const Checkpoint>(std::move(*checkpoint));
}

namespace {

void require_dtype(const Checkpoint& checkpoint, const Value& value, const std::string& precision) {
  const DType dtype = checkpoint.dtype(value.name);
  const auto& settings = checkpoint.position().settings;
  const auto before = settings.find("precision");
  TRAINRT_REQUIRE(dtype == value.type.dtype,
                  kInvalidArgument,
                  "checkpoint '",
                  checkpoint.path(),
                  "' holds '",
                  value.name,
                  "' in ",
                  dtype_name(dtype),
                  ", --precision ",
                  precision,
                  " wants ",
                  dtype_name(value.type.dtype),
                  "; continue with ",
                  before == settings.end() ? "the --precision that it was trained with"
                                           : "--precision " + before->second,
                  ", or start anew from its --export in another --checkpoint-dir");
}

}  // namespace

TensorsOfResume compare_tensors(const Checkpoint& checkpoint, const TrainingJob& job) {
  std::set<std::string> held;  // what the run changes
  std::set<std::string> kept;  // weights that it only reads
  for (const Value& value : job.example->graph.values()) {
    if (value.kind == ValueKind::kConstant && value.source.load) {
      kept.insert(value.name);
    } else if (is_persistent(value.kind) && value.kind != ValueKind::kConstant &&
               value.kind != ValueKind::kGradient) {
      held.insert(value.name);
      if (checkpoint.has(value.name)) {
        require_dtype(checkpoint, value, job.precision);
      }
    }
  }
  TensorsOfResume result;
  for (const std::string& name : checkpoint.names()) {
    // A weight, or its optimizer's state: "weight.momentum".
    const bool is_kept = std::any_of(kept.begin(), kept.end(), [&](const std::string& weight) {
      return name == weight || name.rfind(weight + ".", 0) == 0;
    });
    if (is_kept && held.count(name) == 0) {
      result.carried.push_back(name);
    }
  }
  for (const std::string& name : held) {
    // A checkpoint without settings cannot tell a weight frozen so far from damage.
    if (!checkpoint.has(name) && !checkpoint.position().settings.empty()) {
      result.fresh.insert(name);
    }
  }
  return result;
}

}  // namespace trainrt
