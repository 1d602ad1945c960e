#include "runtime/option_checks.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "graph/base/error.h"
#include "graph/base/log.h"
#include "graph/onnx_weight_files.h"
#include "runtime/file_bytes.h"
#include "runtime/load_cuda.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

// Hyperparameters and the optimizers that have them.
const std::map<std::string, std::vector<std::string>> kOptimizersOf = {
    {"momentum", {"momentum"}},
    {"nesterov", {"momentum"}},
    {"beta1", {"adam", "adamw", "lamb"}},
    {"beta2", {"adam", "adamw", "lamb"}},
    {"eps", {"adam", "adamw", "adagrad", "lamb"}}};

std::string either_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return text;
}

// A momentum of 0 and Nesterov switched off say what every optimizer does.
bool asks_for_nothing(const std::string& name, const Options& options) {
  return (name == "momentum" && options.momentum == 0) || (name == "nesterov" && !options.nesterov);
}

void check_hyperparameters(const Options& options) {
  for (const auto& [name, optimizers] : kOptimizersOf) {
    const bool known =
        std::find(optimizers.begin(), optimizers.end(), options.optimizer) != optimizers.end();
    TRAINRT_REQUIRE(!options.is_given(name) || known || asks_for_nothing(name, options),
                    kInvalidArgument,
                    "--",
                    name,
                    " has no effect with --optimizer ",
                    options.optimizer,
                    name == "momentum" && options.optimizer == "sgd"
                        ? "; SGD with momentum is --optimizer momentum"
                        : concat("; it belongs to --optimizer ", either_of(optimizers)));
  }
  for (const auto& [name, value] : {std::pair<const char*, double>{"beta1", options.beta1},
                                    std::pair<const char*, double>{"beta2", options.beta2}}) {
    TRAINRT_REQUIRE(
        value < 1, kInvalidArgument, "--", name, " is ", value, "; wanted at least 0 and below 1");
  }
}

// Only flags: a configuration file may keep what another reduction reads.
void check_modes(const Options& options) {
  const auto refuse = [&](const char* name, bool effective, const std::string& reason) {
    TRAINRT_REQUIRE(effective || options.flags.count(name) == 0,
                    kInvalidArgument,
                    "--",
                    name,
                    " has no effect with ",
                    reason);
  };
  refuse("logical-shards",
         options.reduction == "exact",
         concat("--reduction ", options.reduction, "; it belongs to --reduction exact"));
}

struct NamedFile {
  std::string flag;
  std::string path;
};

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) {
    return true;
  }
  const fs::path whole = fs::weakly_canonical(a, error);
  return !whole.empty() && whole == fs::weakly_canonical(b, error);
}

std::vector<NamedFile> input_files(const std::string& command, const Options& options) {
  std::vector<NamedFile> files;
  if (command != "model") {  // whose argument is a name
    for (const std::string& argument : options.arguments) {
      files.push_back({command == "validate" ? "the measured rows" : "the model", argument});
    }
  }
  std::string data = options.data;
  for (const std::string& kind : {std::string("tokens:"), std::string("text:")}) {
    data = data.rfind(kind, 0) == 0 ? data.substr(kind.size()) : data;
  }
  std::error_code error;
  if (fs::is_directory(data, error)) {
    for (const auto& entry : fs::directory_iterator(data, error)) {
      if (entry.path().filename().string().find("-idx") != std::string::npos) {
        files.push_back({"--data", entry.path().string()});
      }
    }
  } else if (data != "synthetic") {
    files.push_back({"--data", data});
  }
  // A folder, but no output may take its name.
  for (const NamedFile& file : {NamedFile{"--checkpoint-dir", options.checkpoint_dir},
                                NamedFile{"--config", options.config},
                                NamedFile{"--cluster", options.cluster},
                                NamedFile{"--plan", options.plan}}) {
    files.push_back(file);
  }
  return files;
}

// Those that were given.
std::vector<NamedFile> output_files(const Options& options) {
  std::vector<NamedFile> files;
  for (const NamedFile& file : {NamedFile{"--export", options.export_file},
                                NamedFile{"--metrics", options.metrics},
                                NamedFile{"--trace", options.trace},
                                NamedFile{"--annotate", options.annotate},
                                NamedFile{"--bands", options.bands},
                                NamedFile{"--calibrate", options.calibrate},
                                NamedFile{"-o", options.output_file}}) {
    if (!file.path.empty()) {
      files.push_back(file);
    }
  }
  return files;
}

void require_outputs(const Options& options) {
  for (const NamedFile& output : output_files(options)) {
    require_writable(output.path, output.flag);
  }
}

// No output may be one of the files `taken`, nor another output.
void refuse_replacing(const Options& options, std::vector<NamedFile> taken) {
  for (const NamedFile& output : output_files(options)) {
    if (output.path.rfind("/dev/", 0) == 0) {
      continue;
    }
    for (const NamedFile& other : taken) {
      TRAINRT_REQUIRE(other.path.empty() || !is_same_file(output.path, other.path),
                      kInvalidArgument,
                      output.flag,
                      " '",
                      output.path,
                      "' would replace ",
                      other.flag,
                      ", which is the same file; choose another name");
    }
    taken.push_back(output);
  }
}

}  // namespace

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
  for (const char* name : {"checkpoint-every", "checkpoint-keep"}) {
    TRAINRT_REQUIRE(has_folder || options.flags.count(name) == 0,
                    kInvalidArgument,
                    "--",
                    name,
                    " wants --checkpoint-dir DIR");
  }
  TRAINRT_REQUIRE(options.loss != "output:",
                  kInvalidArgument,
                  "--loss output: names no output; wanted output:NAME");
  check_hyperparameters(options);
  check_modes(options);
}

void check_files(const std::string& command, const Options& options) {
  TRAINRT_REQUIRE(options.format != "html" || command == "plan",
                  kInvalidArgument,
                  "--format html is a form of 'trainrt plan'; 'trainrt ",
                  command,
                  "' prints text or json");
  refuse_replacing(options, input_files(command, options));
  if (options.checkpoint_dir.empty()) {  // an output may lie in that folder, which check_outputs()
    require_outputs(options);            // makes first
  }
}

void check_loss_scaling(const Options& options, const std::string& precision) {
  for (const char* name : {"init-scale", "growth-factor", "backoff-factor", "growth-interval"}) {
    TRAINRT_REQUIRE(precision == "fp16" || options.flags.count(name) == 0,
                    kInvalidArgument,
                    "--",
                    name,
                    " has no effect with --precision ",
                    precision,
                    "; it belongs to --precision fp16");
  }
  TRAINRT_REQUIRE(options.backoff_factor > 0 && options.backoff_factor < 1,
                  kInvalidArgument,
                  "--backoff-factor is ",
                  options.backoff_factor,
                  ", by which the loss scale is to shrink; wanted more than 0 and less than 1");
}

void check_eval_length(const Options& options) {
  TRAINRT_REQUIRE(options.steps.value_or(1) > 0 && options.epochs.value_or(1) > 0,
                  kInvalidArgument,
                  options.steps ? "--steps 0" : "--epochs 0",
                  " leaves 'trainrt eval' nothing to evaluate; give at least 1, or neither for all "
                  "of the data");
}

void check_weight_files(const Options& options, const OnnxModel& model) {
  std::vector<NamedFile> files;
  for (const WeightFile& file : weight_files(model)) {
    files.push_back({"the model's weights", file.path});
  }
  refuse_replacing(options, std::move(files));
}

void refuse_beside_training_info(const Options& options, bool reads_learning_rate) {
  for (const OptionDef& option : option_table()) {
    const bool trains = (option.groups & kTrainingOptions) != 0 ||
                        (option.name == "precision" && options.precision != "auto");
    const bool sets_rate =
        option.name == "lr" || option.name == "lr-schedule" || option.name == "warmup-steps";
    TRAINRT_REQUIRE(!trains || !options.is_given(option.name) || (sets_rate && reads_learning_rate),
                    kInvalidArgument,
                    "--",
                    option.name,
                    " has no effect: the model's own training_info says how it is trained; "
                    "--optimizer NAME or --loss KIND has it trained by the flags instead");
  }
}

void warn_of_idle_pins(const Options& options, const Plan& plan) {
  if (options.zero.value_or(0) > 0 && plan.data_parallel == 1) {
    log_warning("--zero ",
                *options.zero,
                " changes nothing: the plan has one data rank (dp 1), which holds all");
  }
  if (!options.schedule.empty() && !goes_on(plan.schedule) && plan.pipeline_parallel == 1) {
    log_warning("--schedule ",
                options.schedule,
                " changes nothing: the plan has no pipeline (pp 1), and so one order of work");
  } else if (plan.schedule == ScheduleKind::kInterleaved && plan.virtual_stages == 1) {
    log_warning(
        "--schedule interleaved is 1f1b here: the plan has one virtual stage a rank; "
        "--virtual-stages N gives it more");
  }
  if (plan.micro_batch_size < options.micro_batch_size) {
    log_warning("--micro-batch-size ",
                options.micro_batch_size,
                " is more than there is at once: with --batch-size ",
                options.batch_size,
                " micro-batches have ",
                plan.micro_batch_size,
                " samples");
  }
}

void check_outputs(const Options& options) {
  if (!options.checkpoint_dir.empty()) {  // first, for another output may lie in it
    std::error_code error;
    fs::create_directories(options.checkpoint_dir, error);
    TRAINRT_REQUIRE(!error,
                    kIo,
                    "cannot create --checkpoint-dir '",
                    options.checkpoint_dir,
                    "': ",
                    error.message());
    require_writable(options.checkpoint_dir + "/manifest.json", "--checkpoint-dir");
  }
  require_outputs(options);
}

}  // namespace trainrt
