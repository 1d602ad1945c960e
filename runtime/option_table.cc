// The options themselves: one line each.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "graph/base/error.h"
#include "runtime/options.h"

namespace trainrt {

namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
// More than any run has, and few enough to be multiplied by its batch.
constexpr double kMostSteps = 1e12;
constexpr double kMostEpochs = 1e9;
// Threads and processes of one machine: beyond, the system's limits end the program.
constexpr double kMostThreads = 1024;

// Sizes of example models: more than any has, and their products are still numbers.
constexpr double kMostLayers = 10000;
constexpr double kLargestDim = 1e9;

template <typename T>
std::string number_text(T value) {
  char buffer[64];
  const auto [end, status] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return status == std::errc() ? std::string(buffer, end) : std::string();
}

// More is a slip, and would be told as a model whose shapes are too large.
constexpr double kMostSamplesOfStep = std::numeric_limits<int32_t>::max();
constexpr double kMostRanks = std::numeric_limits<int32_t>::max();

template <typename T>
T parse_number(const std::string& text, const std::string& where, double low, double high) {
  T value{};
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size();
  TRAINRT_REQUIRE(status != std::errc::result_out_of_range || !whole,
                  kInvalidArgument,
                  where,
                  " is ",
                  text,
                  ", which no ",
                  std::is_integral_v<T> ? "64-bit integer" : "double-precision number",
                  " can be");
  TRAINRT_REQUIRE(status == std::errc() && whole,
                  kInvalidArgument,
                  where,
                  " is '",
                  text,
                  "'; wanted ",
                  std::is_integral_v<T> ? "an integer" : "a number");
  TRAINRT_REQUIRE(std::isfinite(static_cast<double>(value)),
                  kInvalidArgument,
                  where,
                  " is ",
                  text,
                  "; wanted a finite number");
  TRAINRT_REQUIRE(
      static_cast<double>(value) >= low && static_cast<double>(value) <= high,
      kInvalidArgument,
      where,
      " is ",
      text,
      "; wanted ",
      high == kNoLimit ? concat("at least ", low) : concat(low, " to ", number_text(high)));
  return value;
}

bool parse_bool(const std::string& text, const std::string& where) {
  const bool yes = text == "true" || text == "yes" || text == "on" || text == "1";
  const bool no = text == "false" || text == "no" || text == "off" || text == "0";
  TRAINRT_REQUIRE(yes || no, kInvalidArgument, where, " is '", text, "'; wanted true or false");
  return yes;
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += c;
  }
  return result + "\"";
}

OptionDef define(std::string name, unsigned groups, std::string value, std::string help) {
  OptionDef def;
  def.name = std::move(name);
  def.groups = groups;
  def.value = std::move(value);
  def.help = std::move(help);
  return def;
}

OptionDef text(std::string name,
               unsigned groups,
               std::string Options::*member,
               std::string value,
               std::string help,
               std::vector<std::string> allowed = {}) {
  OptionDef def = define(std::move(name), groups, std::move(value), std::move(help));
  def.set = [member, allowed](Options& o, const std::string& v, const std::string& where) {
    std::string list;
    for (const std::string& item : allowed) {
      list += (list.empty() ? "" : ", ") + item;
    }
    TRAINRT_REQUIRE(
        allowed.empty() || std::find(allowed.begin(), allowed.end(), v) != allowed.end(),
        kInvalidArgument,
        where,
        " is '",
        v,
        "'; wanted one of ",
        list,
        did_you_mean(v, allowed));
    o.*member = v;
  };
  def.get = [member](const Options& o) { return quoted(o.*member); };
  return def;
}

template <typename T>
OptionDef number(std::string name,
                 unsigned groups,
                 T Options::*member,
                 std::string help,
                 double low = 0,
                 double high = kNoLimit) {
  OptionDef def =
      define(std::move(name), groups, std::is_integral_v<T> ? "N" : "X", std::move(help));
  def.set = [=](Options& o, const std::string& v, const std::string& where) {
    o.*member = parse_number<T>(v, where, low, high);
  };
  def.get = [member](const Options& o) { return number_text(o.*member); };
  return def;
}

template <typename T>
OptionDef maybe(std::string name,
                unsigned groups,
                std::optional<T> Options::*member,
                std::string help,
                double low = 0,
                double high = kNoLimit) {
  OptionDef def =
      define(std::move(name), groups, std::is_integral_v<T> ? "N" : "X", std::move(help));
  def.set = [=](Options& o, const std::string& v, const std::string& where) {
    o.*member = parse_number<T>(v, where, low, high);
  };
  def.get = [member](const Options& o) { return o.*member ? number_text(*(o.*member)) : ""; };
  return def;
}

OptionDef toggle(std::string name, unsigned groups, bool Options::*member, std::string help) {
  OptionDef def = define(std::move(name), groups, "", std::move(help));
  def.set = [member](Options& o, const std::string& v, const std::string& where) {
    o.*member = parse_bool(v, where);
  };
  def.get = [member](const Options& o) { return o.*member ? "true" : "false"; };
  return def;
}

OptionDef list(std::string name,
               unsigned groups,
               std::vector<std::string> Options::*member,
               std::string value,
               std::string help) {
  OptionDef def = define(std::move(name), groups, std::move(value), std::move(help));
  def.repeatable = true;
  def.set = [member](Options& o, const std::string& v, const std::string&) {
    (o.*member).push_back(v);
  };
  def.get = [member](const Options& o) {
    std::string items;
    for (const std::string& item : o.*member) {
      items += (items.empty() ? "" : ", ") + quoted(item);
    }
    return "[" + items + "]";
  };
  def.clear = [member](Options& o) { (o.*member).clear(); };
  return def;
}

std::vector<OptionDef> data_options() {
  const unsigned d = kDataOptions;
  using O = Options;
  return {
      text("data",
           d,
           &O::data,
           "SPEC",
           "synthetic, F.npz, a folder of IDX files, tokens:F.bin or text:F.txt"),
      list("input",
           d,
           &O::input,
           "NAME=ARRAY",
           "feed graph input NAME from data array ARRAY (repeatable)"),
      list("batch-axis",
           d,
           &O::batch_axis,
           "NAME=K",
           "which axis of an input or array is the batch (repeatable)"),
      list("bind", d, &O::bind, "DIM=N", "size of a symbolic dim of the model (repeatable)"),
      text("loss",
           d,
           &O::loss,
           "KIND",
           "auto, softmax_cross_entropy, nll, mse, bce_with_logits, l1 or output:NAME"),
      text("labels",
           d,
           &O::labels,
           "NAME",
           "graph input or data array that holds the labels (else labels, label, y, target or "
           "targets)"),
      text("output", d, &O::output, "NAME", "graph output the loss reads"),
      number("batch-size",
             d,
             &O::batch_size,
             "samples per step, over all ranks",
             1,
             kMostSamplesOfStep),
      number("micro-batch-size",
             d,
             &O::micro_batch_size,
             "samples per micro-batch (0: planner)",
             0,
             kMostSamplesOfStep),
      maybe("steps",
            d,
            &O::steps,
            "steps in all, a resumed run's earlier ones included",
            0,
            kMostSteps),
      maybe("epochs", d, &O::epochs, "passes over the data in all (default 1)", 0, kMostEpochs),
      number("seed", d, &O::seed, "of shuffling, dropout and synthetic data"),
      text("precision",
           d,
           &O::precision,
           "P",
           "auto, fp64, fp32, tf32, bf16 or fp16",
           {"auto", "fp64", "fp32", "tf32", "bf16", "fp16"}),
  };
}

std::vector<OptionDef> training_options() {
  const unsigned t = kTrainingOptions;
  using O = Options;
  return {
      list("trainable", t, &O::trainable, "GLOB", "train only what matches (repeatable)"),
      list("freeze", t, &O::freeze, "GLOB", "do not train what matches (repeatable)"),
      text("optimizer",
           t,
           &O::optimizer,
           "NAME",
           "sgd, momentum, adam, adamw, adagrad or lamb",
           {"sgd", "momentum", "adam", "adamw", "adagrad", "lamb"}),
      number("lr", t, &O::lr, "learning rate"),
      maybe("weight-decay", t, &O::weight_decay, "default 0.01 for adamw and lamb, else 0"),
      number("momentum", t, &O::momentum, "of momentum", 0, 1),
      toggle("nesterov", t, &O::nesterov, "Nesterov's form of momentum"),
      number("beta1", t, &O::beta1, "of adam, adamw, lamb", 0, 1),
      number("beta2", t, &O::beta2, "of adam, adamw, lamb", 0, 1),
      number("eps", t, &O::eps, "of adam, adamw, adagrad, lamb"),
      number("clip-norm", t, &O::clip_norm, "clip the gradient's global norm (0: off)"),
      text("lr-schedule",
           t,
           &O::lr_schedule,
           "KIND",
           "constant, or linear or cosine from --lr to 0 over all steps",
           {"constant", "linear", "cosine"}),
      number("warmup-steps", t, &O::warmup_steps, "steps over which the learning rate rises"),
      number("init-scale", t, &O::init_scale, "fp16: first loss scale", 1),
      number("growth-factor", t, &O::growth_factor, "fp16: the scale grows by", 1),
      number("backoff-factor", t, &O::backoff_factor, "fp16: the scale shrinks to", 0, 1),
      number("growth-interval", t, &O::growth_interval, "fp16: finite steps between growths", 1),
  };
}

std::vector<OptionDef> plan_options() {
  const unsigned p = kPlanOptions;
  using O = Options;
  return {
      text("devices",
           p | kDeviceOptions,
           &O::devices,
           "SPEC",
           "cpu, cpu:N (threads), cuda or cuda:0,1 (a process each)"),
      text("cluster", p, &O::cluster, "FILE|PRESET", "the machines to plan for"),
      text("plan",
           p,
           &O::plan,
           "FILE",
           "a plan as JSON; what it leaves out is planned. none: not even the plan that the model "
           "carries"),
      maybe("dp", p, &O::dp, "data-parallel degree", 1, kMostRanks),
      maybe("tp", p, &O::tp, "tensor-parallel degree", 1, kMostRanks),
      maybe("pp", p, &O::pp, "pipeline stages", 1, kMostRanks),
      maybe("virtual-stages",
            p,
            &O::virtual_stages,
            "virtual stages per pipeline rank",
            1,
            kMostRanks),
      text("schedule",
           p,
           &O::schedule,
           "NAME",
           "gpipe, 1f1b, interleaved, zb-h1 or 2bw",
           {"", "gpipe", "1f1b", "interleaved", "zb-h1", "2bw"}),
      text("recompute",
           p,
           &O::recompute,
           "MODE",
           "none, selective or full",
           {"", "none", "selective", "full"}),
      maybe("zero", p, &O::zero, "ZeRO stage", 0, 3),
      toggle("sequence-parallel", p, &O::sequence_parallel, "shard the sequence between layers"),
      text("offload",
           p,
           &O::offload,
           "WHAT",
           "optimizer: keep optimizer state on the host",
           {"", "none", "optimizer"}),
      text("batch-norm", p, &O::batch_norm, "KIND", "local or sync", {"local", "sync"}),
      text("shares", p, &O::shares, "A,B,..", "the batch over the data ranks in this proportion"),
      number(
          "max-tokens",
          p,
          &O::max_tokens,
          "tokens per micro-batch with its padding (0: no limit); a step's samples are sorted by "
          "length, from array lengths, attention_mask or the ignored labels, and dealt to the "
          "ranks by tokens"),
      toggle("rebalance",
             p,
             &O::rebalance,
             "measure the data ranks while they run; move work between them when one slows"),
      text("reduction", p, &O::reduction, "KIND", "fast or exact", {"fast", "exact"}),
      number("logical-shards", p, &O::logical_shards, "of --reduction exact", 1),
      number("threads",
             p | kDeviceOptions,
             &O::threads,
             "CPU threads per rank (0: cores / ranks)",
             0,
             kMostThreads),
      number("nproc",
             p | kDeviceOptions,
             &O::nproc,
             "processes to start on this machine",
             1,
             kMostThreads),
      number("seconds", kDeviceOptions, &O::profile_seconds, "about how long to measure", 0.1, 600),
      number("deadline", p, &O::deadline, "seconds a rank waits for another", 1e-3),
      text("cuda-graphs",
           p,
           &O::cuda_graphs,
           "WHEN",
           "on or off: kernels of a step are recorded as CUDA graphs and replayed",
           {"on", "off"}),
      text("algorithm-cache",
           p,
           &O::algorithm_cache,
           "FILE",
           "where measured choices of GPU algorithms are kept, or none "
           "(~/.cache/trainrt/algorithms)"),
      toggle("deterministic", p, &O::deterministic, "on GPUs too, equal bits in every run"),
  };
}

OptionDef profile_steps() {
  OptionDef def =
      define("profile-steps", kRunOptions, "A:B", "the steps that a GPU profiler is to record");
  def.set = [](Options& o, const std::string& v, const std::string& where) {
    const size_t colon = v.find(':');
    TRAINRT_REQUIRE(colon != std::string::npos,
                    kInvalidArgument,
                    where,
                    " is '",
                    v,
                    "'; wanted the first and the last step, as in 10:12");
    o.profile_first = parse_number<int64_t>(v.substr(0, colon), where, 1, kNoLimit);
    o.profile_last = parse_number<int64_t>(
        v.substr(colon + 1), where, static_cast<double>(o.profile_first), kNoLimit);
  };
  def.get = [](const Options& o) {
    return o.profile_first == 0 ? "" : quoted(concat(o.profile_first, ":", o.profile_last));
  };
  return def;
}

std::vector<OptionDef> output_options() {
  const unsigned r = kRunOptions;
  using O = Options;
  return {
      text("checkpoint-dir", r, &O::checkpoint_dir, "DIR", "where checkpoints are written"),
      number(
          "checkpoint-every", r, &O::checkpoint_every, "steps between checkpoints (0: at the end)"),
      number("checkpoint-keep",
             r,
             &O::checkpoint_keep,
             "checkpoints kept, the newest ones (0: all); older ones are removed after a save"),
      toggle("resume", r, &O::resume, "continue from the newest complete checkpoint"),
      text("export", r, &O::export_file, "F.onnx", "write the trained model"),
      text("metrics", r, &O::metrics, "F.jsonl", "write one JSON object per step"),
      profile_steps(),
      text("trace", kTraceOptions, &O::trace, "F.json", "write a time line for a trace viewer"),
      text("objective",
           kReportOptions,
           &O::objective,
           "WHAT",
           "throughput, memory, devices or cost",
           {"throughput", "memory", "devices", "cost"}),
      text("what-if",
           kReportOptions,
           &O::what_if,
           "WHEN",
           "search again for what would change the answer: auto (after searches of at most "
           "10,000 candidates), on or off",
           {"auto", "on", "off"}),
      text("price",
           kReportOptions,
           &O::price,
           "X",
           "of a device hour, or TYPE=X,.. by type; for --objective cost"),
      text("annotate",
           kReportOptions,
           &O::annotate,
           "F.onnx",
           "write the model with the plan in it"),
      text("convention",
           kValidateOptions,
           &O::convention,
           "ENGINE",
           "megatron, deepspeed, fsdp, trainrt, or auto: by the file's name",
           {"megatron", "deepspeed", "fsdp", "trainrt", "auto"}),
      text("bands",
           kValidateOptions,
           &O::bands,
           "FILE",
           "write the table of error bands that plan reports"),
      text("calibrate",
           kValidateOptions,
           &O::calibrate,
           "FILE",
           "fit the device's constants to the rows; write a cluster file for plan"),
      text("format",
           kFormatOptions,
           &O::format,
           "F",
           "text or json (plan: html as well)",
           {"text", "json", "html"}),
      text("output-file", kOutputOptions, &O::output_file, "FILE", "write here instead of stdout"),
  };
}

std::vector<OptionDef> model_options() {
  const unsigned m = kModelOptions;
  using O = Options;
  return {
      number("layers", m, &O::layers, "blocks", 1, kMostLayers),
      number("hidden", m, &O::hidden, "width", 1, kLargestDim),
      number("heads", m, &O::heads, "attention heads", 1, kLargestDim),
      number("kv-heads", m, &O::kv_heads, "key and value heads", 1, kLargestDim),
      number("ffn", m, &O::ffn, "width of the feed-forward part", 1, kLargestDim),
      number("vocab", m, &O::vocab, "vocabulary", 1, kLargestDim),
      number("seq", m, &O::seq, "sequence length", 1, kLargestDim),
      toggle("symbolic-seq",
             m,
             &O::symbolic_seq,
             "gpt2: leave the sequence length, of at most --seq, to --bind sequence=N"),
      toggle("external-weights",
             m,
             &O::external_weights,
             "weights into F.onnx.weights; 2 GiB of them and more are left out otherwise"),
      number("classes", m, &O::classes, "classes", 1, kLargestDim),
      number("image", m, &O::image, "side of the square image", 1, kLargestDim),
      number("channels", m, &O::channels, "channels of the image", 1, kLargestDim),
      number("dropout", m, &O::dropout, "dropout probability", 0, 1),
      number("seed", m, &O::seed, "of the initial weights"),
  };
}

}  // namespace

const std::vector<OptionDef>& option_table() {
  static const std::vector<OptionDef> table = [] {
    std::vector<OptionDef> all;
    for (const auto& part :
         {data_options(), training_options(), plan_options(), output_options(), model_options()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return table;
}

const OptionDef* find_option(const std::string& name) {
  for (const OptionDef& def : option_table()) {
    if (def.name == name) {
      return &def;
    }
  }
  return nullptr;
}

}  // namespace trainrt
