// Everything a user can say on the command line, in a configuration file or with --set, in one
// table: each option has a name, a check, a help text and a place in Options. A later source wins:
// defaults, --config, --set, flags.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace trainrt {

struct Options {
  std::vector<std::string> arguments;  // positional: MODEL.onnx, a model's name, CSV files

  // data
  std::string data = "synthetic";
  std::vector<std::string> input;       // NAME=ARRAY
  std::vector<std::string> batch_axis;  // NAME=K
  std::vector<std::string> bind;        // DIM=N
  std::string loss = "auto";
  std::string labels;
  std::string output;
  int64_t batch_size = 32;
  int64_t micro_batch_size = 0;  // 0: the planner's choice
  std::optional<int64_t> steps;
  std::optional<int64_t> epochs;
  std::string precision = "auto";

  // training
  std::vector<std::string> trainable;
  std::vector<std::string> freeze;
  std::string optimizer = "adamw";
  double lr = 1e-3;
  std::optional<double> weight_decay;
  double momentum = 0.9;
  bool nesterov = false;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double clip_norm = 0;
  std::string lr_schedule = "constant";
  int64_t warmup_steps = 0;
  int64_t seed = 0;
  double init_scale = 65536;  // fp16's dynamic loss scaling
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;

  // plan
  std::string devices;
  std::string cluster;
  std::string plan;
  std::optional<int64_t> dp;
  std::optional<int64_t> tp;
  std::optional<int64_t> pp;
  std::optional<int64_t> virtual_stages;
  std::string schedule;
  std::string recompute;
  std::optional<int64_t> zero;
  bool sequence_parallel = false;
  std::string offload;
  std::string batch_norm = "local";
  std::string shares;
  int64_t max_tokens = 0;
  bool rebalance = false;
  std::string reduction = "fast";
  int64_t logical_shards = 8;
  int64_t threads = 0;  // 0: cores / local ranks
  int64_t nproc = 1;
  double deadline = 60;
  double profile_seconds = 10;
  bool deterministic = false;
  std::string cuda_graphs = "on";
  std::string what_if = "auto";
  std::string algorithm_cache;

  // run
  std::string checkpoint_dir;
  int64_t checkpoint_every = 0;
  int64_t checkpoint_keep = 0;  // 0: all
  bool resume = false;
  std::string export_file;
  std::string metrics;
  std::string trace;
  int64_t profile_first = 0, profile_last = 0;  // steps, from 1

  // plan's report and others' output
  std::string objective = "throughput";
  std::string price;
  std::string annotate;
  std::string convention = "trainrt";
  std::string bands;      // file to write the table of error bands to
  std::string calibrate;  // file to write the fitted device to
  std::string format = "text";
  std::string output_file;  // -o

  // model
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, ffn = 0, vocab = 0, seq = 0, classes = 0,
          image = 0, channels = 0;
  double dropout = -1;
  bool symbolic_seq = false;
  bool external_weights = false;

  // Not the user's to say: ranks on several GPUs are threads of one process, for tests on a double
  // of CUDA's libraries.
  bool gpus_in_threads = false;

  std::string config;           // --config FILE
  std::set<std::string> given;  // names of options that some source set
  std::set<std::string> flags;  // and of those on the command line
  bool is_given(const std::string& name) const { return given.count(name) != 0; }
};

// Which commands take an option.
enum OptionGroup : unsigned {
  kDataOptions = 1,
  kTrainingOptions = 2,
  kPlanOptions = 4,
  kRunOptions = 8,
  kReportOptions = 16,   // of plan
  kModelOptions = 32,    // sizes of an example model
  kFormatOptions = 64,   // --format
  kOutputOptions = 128,  // -o
  kValidateOptions = 256,
  kTraceOptions = 512,    // --trace: run and plan
  kDeviceOptions = 1024,  // --devices, --threads, --nproc
};

struct OptionDef {
  std::string name;  // "batch-size"; the flag is --batch-size
  unsigned groups = 0;
  std::string value;  // "N", "FILE", "" for a switch
  std::string help;
  bool repeatable = false;
  // Throws kInvalidArgument for a value it cannot take; `where` names the source ("--lr").
  std::function<void(Options&, const std::string& value, const std::string& where)> set;
  std::function<std::string(const Options&)> get;  // as YAML
  std::function<void(Options&)> clear;             // of repeatable options
};

// A value as `get` writes it, or JSON, for a message: without quotes; "unset" for none.
std::string shown_setting(const std::string& value);

const std::vector<OptionDef>& option_table();
const OptionDef* find_option(const std::string& name);

// Thrown by parse_options for --help.
struct HelpRequested {
  std::string text;
};

// The command line of one command: its flags, then positional arguments. `groups` are the options
// the command takes. Reads --config and applies --set on the way. Throws kInvalidArgument with near
// names for what it does not know.
Options parse_options(const std::string& command,
                      unsigned groups,
                      const std::vector<std::string>& arguments);

// All options of `groups` with their values, as YAML that --config reads back.
std::string resolved_config(const Options& options, unsigned groups);

// "NAME=VALUE" items. Throws kInvalidArgument naming `flag` when there is no '='.
std::vector<std::pair<std::string, std::string>> parse_pairs(const std::vector<std::string>& items,
                                                             const std::string& flag);

}  // namespace trainrt
