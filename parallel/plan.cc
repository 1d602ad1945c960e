// Plan as JSON (CONTRACT section 2).
#include "parallel/plan.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "graph/base/json.h"
#include "parallel/micro_batches.h"

namespace trainrt {

namespace {

using Json = nlohmann::ordered_json;

// One object of the file: knows where it lies, so that every complaint names the key.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string where, const std::vector<std::string>& keys)
      : json_(json), where_(std::move(where)) {
    TRAINRT_REQUIRE(json.is_object(),
                    kInvalidArgument,
                    where_,
                    " is ",
                    json_excerpt(json),
                    ", wanted an object");
    for (const auto& [key, value] : json.items()) {
      TRAINRT_REQUIRE(std::find(keys.begin(), keys.end(), key) != keys.end(),
                      kInvalidArgument,
                      where_,
                      ": unknown key '",
                      key,
                      "'",
                      did_you_mean(key, keys));
    }
  }

  // Reads `key` into `target` when it is there.
  template <typename T>
  void read(const char* key, T& target) const {
    const auto it = json_.find(key);
    if (it != json_.end() && !it->is_null()) {
      target = value<T>(*it, concat(where_, ".", key));
    }
  }

  template <typename T, typename Fn>
  void read_list(const char* key, std::vector<T>& target, Fn&& read_item) const {
    const auto it = json_.find(key);
    if (it == json_.end() || it->is_null()) {
      return;
    }
    TRAINRT_REQUIRE(it->is_array(),
                    kInvalidArgument,
                    where_,
                    ".",
                    key,
                    " is ",
                    json_excerpt(*it),
                    ", wanted a list");
    for (size_t i = 0; i < it->size(); ++i) {
      target.push_back(read_item((*it)[i], concat(where_, ".", key, "[", i, "]")));
    }
  }

  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  const std::string& where() const { return where_; }

  template <typename T>
  static T value(const Json& json, const std::string& where) {
    if constexpr (std::is_same_v<T, bool>) {
      TRAINRT_REQUIRE(json.is_boolean(),
                      kInvalidArgument,
                      where,
                      " is ",
                      json_excerpt(json),
                      ", wanted true or false");
    } else if constexpr (std::is_same_v<T, std::string>) {
      TRAINRT_REQUIRE(json.is_string(),
                      kInvalidArgument,
                      where,
                      " is ",
                      json_excerpt(json),
                      ", wanted a string");
    } else {
      TRAINRT_REQUIRE(json.is_number_integer() &&
                          json.get<int64_t>() >= std::numeric_limits<T>::min() &&
                          json.get<int64_t>() <= std::numeric_limits<T>::max(),
                      kInvalidArgument,
                      where,
                      " is ",
                      json_excerpt(json),
                      ", wanted an integer");
    }
    return json.get<T>();
  }

 private:
  const Json& json_;
  std::string where_;
};

constexpr RecomputeMode kRecomputeModes[] = {
    RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull};

RecomputeMode recompute_from_name(const std::string& name, const std::string& where) {
  for (const RecomputeMode mode : kRecomputeModes) {
    if (name == recompute_name(mode)) {
      return mode;
    }
  }
  TRAINRT_FAIL(kInvalidArgument, where, " is '", name, "', wanted none, selective or full");
}

Placement placement_from_string(const std::string& text, const std::string& where) {
  if (text == "replicate") {
    return Placement::replicate();
  }
  if (text == "partial") {
    return Placement::partial();
  }
  const bool digits =
      text.size() > 7 && text.size() < 11 &&
      std::all_of(text.begin() + 6, text.end() - 1, [](char c) { return c >= '0' && c <= '9'; });
  TRAINRT_REQUIRE(digits && text.starts_with("shard(") && text.back() == ')',
                  kInvalidArgument,
                  where,
                  " is '",
                  text,
                  "', wanted shard(d), replicate or partial");
  return Placement::shard(std::stoi(text.substr(6)));
}

// Key "nodes": [first, last].
void read_nodes(const ObjectReader& reader, int* first, int* last) {
  std::vector<int> nodes;
  reader.read_list("nodes", nodes, ObjectReader::value<int>);
  TRAINRT_REQUIRE(nodes.size() == 2 && nodes[0] <= nodes[1] && nodes[0] >= 0,
                  kInvalidArgument,
                  reader.where(),
                  ".nodes: wanted [first, last] with 0 <= first <= last");
  *first = nodes[0];
  *last = nodes[1];
}

RecomputeRun run_from_json(const Json& json, const std::string& where) {
  const ObjectReader reader(json, where, {"nodes", "mode"});
  RecomputeRun run;
  read_nodes(reader, &run.first_node, &run.last_node);
  std::string mode = "none";
  reader.read("mode", mode);
  run.mode = recompute_from_name(mode, where + ".mode");
  return run;
}

PlanStage stage_from_json(const Json& json, const std::string& where) {
  const ObjectReader reader(json, where, {"virtual_stage", "rank_stage", "nodes", "recompute"});
  PlanStage stage;
  reader.read("virtual_stage", stage.virtual_stage);
  reader.read("rank_stage", stage.rank_stage);
  read_nodes(reader, &stage.first_node, &stage.last_node);
  if (const Json* recompute = reader.find("recompute")) {
    const ObjectReader inner(*recompute, where + ".recompute", {"mode", "nodes", "runs"});
    std::string mode = "none";
    inner.read("mode", mode);
    stage.recompute = recompute_from_name(mode, where + ".recompute.mode");
    inner.read_list("nodes", stage.recompute_nodes, ObjectReader::value<std::string>);
    inner.read_list("runs", stage.recompute_runs, run_from_json);
    int next = stage.first_node;
    for (const RecomputeRun& run : stage.recompute_runs) {
      TRAINRT_REQUIRE(run.first_node >= next && run.last_node <= stage.last_node,
                      kInvalidArgument,
                      where,
                      ".recompute.runs: [",
                      run.first_node,
                      ", ",
                      run.last_node,
                      "] should lie within [",
                      next,
                      ", ",
                      stage.last_node,
                      "], what the runs before it leave of the stage");
      next = run.last_node + 1;
    }
  }
  return stage;
}

DataShare share_from_json(const Json& json, const std::string& where) {
  const ObjectReader reader(
      json, where, {"data_rank", "num_samples", "micro_batch_size", "num_micro_batches"});
  DataShare share;
  reader.read("data_rank", share.data_rank);
  reader.read("num_samples", share.num_samples);
  reader.read("micro_batch_size", share.micro_batch_size);
  reader.read("num_micro_batches", share.num_micro_batches);
  TRAINRT_REQUIRE(share.num_samples >= 0 && share.micro_batch_size >= 0,
                  kInvalidArgument,
                  where,
                  ": sizes are counts of samples, wanted at least 0");
  TRAINRT_REQUIRE(share.num_samples == 0 || share.micro_batch_size > 0,
                  kInvalidArgument,
                  where,
                  ".micro_batch_size is 0 for ",
                  share.num_samples,
                  " samples");
  if (reader.find("num_micro_batches") == nullptr) {
    share.num_micro_batches = -1;  // filled in when the reduction is known
  }
  return share;
}

PlanDevice device_from_json(const Json& json, const std::string& where) {
  const ObjectReader reader(json, where, {"rank", "host", "device"});
  PlanDevice device;
  reader.read("rank", device.rank);
  reader.read("host", device.host);
  reader.read("device", device.device);
  return device;
}

void read_placements(const ObjectReader& reader, Plan& plan) {
  const Json* placements = reader.find("placements");
  if (placements == nullptr) {
    return;
  }
  TRAINRT_REQUIRE(placements->is_object(),
                  kInvalidArgument,
                  reader.where(),
                  ".placements is ",
                  json_excerpt(*placements),
                  ", wanted an object");
  for (const auto& [tensor, json] : placements->items()) {
    const std::string where = concat(reader.where(), ".placements['", tensor, "']");
    const ObjectReader inner(json, where, {"data", "tensor"});
    std::string data = "replicate", tensor_axis = "replicate";
    inner.read("data", data);
    inner.read("tensor", tensor_axis);
    plan.placements[tensor] = {placement_from_string(data, where + ".data"),
                               placement_from_string(tensor_axis, where + ".tensor")};
  }
}

const std::vector<std::string> kPlanKeys = {
    "version",           "model_hash",       "bind",          "precision",
    "global_batch",      "micro_batch_size", "data_parallel", "tensor_parallel",
    "pipeline_parallel", "virtual_stages",   "schedule",      "zero_stage",
    "sequence_parallel", "offload",          "reduction",     "logical_shards",
    "batch_norm",        "devices",          "shares",        "stages",
    "placements",        "padding"};

void check_ranges(const Plan& plan) {
  TRAINRT_REQUIRE(plan.version == 1,
                  kInvalidArgument,
                  "plan.version is ",
                  plan.version,
                  ", this program reads version 1");
  for (const auto& [name, value] : {std::pair{"data_parallel", plan.data_parallel},
                                    {"tensor_parallel", plan.tensor_parallel},
                                    {"pipeline_parallel", plan.pipeline_parallel},
                                    {"virtual_stages", plan.virtual_stages}}) {
    TRAINRT_REQUIRE(
        value >= 1, kInvalidArgument, "plan.", name, " is ", value, ", wanted at least 1");
  }
  TRAINRT_REQUIRE(plan.zero_stage >= 0 && plan.zero_stage <= 3,
                  kInvalidArgument,
                  "plan.zero_stage is ",
                  plan.zero_stage,
                  ", wanted 0, 1, 2 or 3");
  TRAINRT_REQUIRE(plan.global_batch >= 0 && plan.micro_batch_size >= 0,
                  kInvalidArgument,
                  "plan.global_batch and plan.micro_batch_size count samples, wanted at least 0");
  TRAINRT_REQUIRE(plan.logical_shards >= 1,
                  kInvalidArgument,
                  "plan.logical_shards is ",
                  plan.logical_shards,
                  ", wanted at least 1");
}

// Each rank has one device and each device one rank. Names may be left out.
void check_devices(const Plan& plan) {
  const int count = static_cast<int>(plan.devices.size());
  std::map<std::pair<std::string, std::string>, int> rank_on;
  std::set<int> ranks;
  for (const PlanDevice& device : plan.devices) {
    TRAINRT_REQUIRE(device.rank >= 0 && device.rank < count,
                    kInvalidArgument,
                    "plan.devices lists ",
                    count,
                    " devices, and rank ",
                    device.rank,
                    " among them; wanted the ranks 0 to ",
                    count - 1);
    TRAINRT_REQUIRE(ranks.insert(device.rank).second,
                    kInvalidArgument,
                    "plan.devices has rank ",
                    device.rank,
                    " twice");
    const auto [known, is_new] =
        rank_on.emplace(std::pair(device.host, device.device), device.rank);
    TRAINRT_REQUIRE(is_new || device.device.empty(),
                    kInvalidArgument,
                    "plan.devices: ranks ",
                    known->second,
                    " and ",
                    device.rank,
                    " are both on ",
                    device.host,
                    "/",
                    device.device);
  }
}

}  // namespace

std::string placement_string(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kReplicate:
      return "replicate";
    case Placement::Kind::kPartial:
      return "partial";
    case Placement::Kind::kShard:
      return concat("shard(", placement.dim, ")");
  }
  return "?";
}

const char* recompute_name(RecomputeMode mode) {
  switch (mode) {
    case RecomputeMode::kNone:
      return "none";
    case RecomputeMode::kSelective:
      return "selective";
    case RecomputeMode::kFull:
      return "full";
  }
  return "?";
}

RecomputeMode PlanStage::recompute_of(int node) const {
  for (const RecomputeRun& run : recompute_runs) {
    if (node >= run.first_node && node <= run.last_node) {
      return run.mode;
    }
  }
  return recompute;
}

bool PlanStage::recomputes() const {
  return recompute != RecomputeMode::kNone ||
         std::any_of(recompute_runs.begin(), recompute_runs.end(), [](const RecomputeRun& run) {
           return run.mode != RecomputeMode::kNone;
         });
}

RankCoordinates rank_coordinates(const Plan& plan, int rank) {
  TRAINRT_CHECK(rank >= 0 && rank < plan.world_size(), "rank ", rank, " of ", plan.world_size());
  const int tensor_rank = rank % plan.tensor_parallel;
  const int rest = rank / plan.tensor_parallel;
  return {rest / plan.data_parallel, rest % plan.data_parallel, tensor_rank};
}

int rank_of(const Plan& plan, const RankCoordinates& coordinates) {
  return (coordinates.stage * plan.data_parallel + coordinates.data_rank) * plan.tensor_parallel +
         coordinates.tensor_rank;
}

std::string plan_to_json(const Plan& plan) {
  Json json;
  json["version"] = plan.version;
  json["model_hash"] = plan.model_hash;
  json["bind"] = plan.bind;
  json["precision"] = plan.precision;
  json["global_batch"] = plan.global_batch;
  json["micro_batch_size"] = plan.micro_batch_size;
  json["data_parallel"] = plan.data_parallel;
  json["tensor_parallel"] = plan.tensor_parallel;
  json["pipeline_parallel"] = plan.pipeline_parallel;
  json["virtual_stages"] = plan.virtual_stages;
  json["schedule"] = schedule_name(plan.schedule);
  json["zero_stage"] = plan.zero_stage;
  json["sequence_parallel"] = plan.sequence_parallel;
  json["offload"] = plan.offload_optimizer ? "optimizer" : "none";
  json["reduction"] = plan.exact_reduction ? "exact" : "fast";
  if (plan.exact_reduction) {
    json["logical_shards"] = plan.logical_shards;
  }
  json["batch_norm"] = plan.sync_batch_norm ? "sync" : "local";
  json["devices"] = Json::array();
  for (const PlanDevice& device : plan.devices) {
    json["devices"].push_back(
        {{"rank", device.rank}, {"host", device.host}, {"device", device.device}});
  }
  json["shares"] = Json::array();
  for (const DataShare& share : plan.shares) {
    json["shares"].push_back({{"data_rank", share.data_rank},
                              {"num_samples", share.num_samples},
                              {"micro_batch_size", share.micro_batch_size},
                              {"num_micro_batches", share.num_micro_batches}});
  }
  json["stages"] = Json::array();
  for (const PlanStage& stage : plan.stages) {
    Json recompute = {{"mode", recompute_name(stage.recompute)}, {"nodes", stage.recompute_nodes}};
    for (const RecomputeRun& run : stage.recompute_runs) {
      recompute["runs"].push_back({{"nodes", Json::array({run.first_node, run.last_node})},
                                   {"mode", recompute_name(run.mode)}});
    }
    json["stages"].push_back({{"virtual_stage", stage.virtual_stage},
                              {"rank_stage", stage.rank_stage},
                              {"nodes", Json::array({stage.first_node, stage.last_node})},
                              {"recompute", std::move(recompute)}});
  }
  json["placements"] = Json::object();
  for (const auto& [tensor, placement] : plan.placements) {
    json["placements"][tensor] = {{"data", placement_string(placement.data)},
                                  {"tensor", placement_string(placement.tensor)}};
  }
  json["padding"] = plan.padding;
  return json.dump(2);
}

Plan plan_from_json(const std::string& text) {
  const Json json = parse_json(text, "the plan");
  const ObjectReader reader(json, "plan", kPlanKeys);
  Plan plan;
  reader.read("version", plan.version);
  reader.read("model_hash", plan.model_hash);
  if (const Json* bind = reader.find("bind")) {
    TRAINRT_REQUIRE(bind->is_object(),
                    kInvalidArgument,
                    "plan.bind is ",
                    json_excerpt(*bind),
                    ", wanted an object");
    for (const auto& [dim, size] : bind->items()) {
      plan.bind[dim] = ObjectReader::value<int64_t>(size, "plan.bind." + dim);
    }
  }
  reader.read("precision", plan.precision);
  reader.read("global_batch", plan.global_batch);
  reader.read("micro_batch_size", plan.micro_batch_size);
  reader.read("data_parallel", plan.data_parallel);
  reader.read("tensor_parallel", plan.tensor_parallel);
  reader.read("pipeline_parallel", plan.pipeline_parallel);
  reader.read("virtual_stages", plan.virtual_stages);
  std::string schedule = schedule_name(plan.schedule), offload = "none", reduction = "fast",
              batch_norm = "local";
  reader.read("schedule", schedule);
  reader.read("zero_stage", plan.zero_stage);
  reader.read("sequence_parallel", plan.sequence_parallel);
  reader.read("offload", offload);
  reader.read("reduction", reduction);
  reader.read("logical_shards", plan.logical_shards);
  reader.read("batch_norm", batch_norm);
  const std::optional<ScheduleKind> kind = schedule_from_name(schedule);
  TRAINRT_REQUIRE(kind.has_value(),
                  kInvalidArgument,
                  "plan.schedule is '",
                  schedule,
                  "', wanted gpipe, 1f1b, interleaved, zb-h1 or 2bw");
  plan.schedule = *kind;
  TRAINRT_REQUIRE(offload == "none" || offload == "optimizer",
                  kInvalidArgument,
                  "plan.offload is '",
                  offload,
                  "', wanted none or optimizer");
  plan.offload_optimizer = offload == "optimizer";
  TRAINRT_REQUIRE(reduction == "fast" || reduction == "exact",
                  kInvalidArgument,
                  "plan.reduction is '",
                  reduction,
                  "', wanted fast or exact");
  plan.exact_reduction = reduction == "exact";
  TRAINRT_REQUIRE(batch_norm == "local" || batch_norm == "sync",
                  kInvalidArgument,
                  "plan.batch_norm is '",
                  batch_norm,
                  "', wanted local or sync");
  plan.sync_batch_norm = batch_norm == "sync";
  reader.read_list("devices", plan.devices, device_from_json);
  reader.read_list("shares", plan.shares, share_from_json);
  reader.read_list("stages", plan.stages, stage_from_json);
  read_placements(reader, plan);
  if (const Json* padding = reader.find("padding")) {
    TRAINRT_REQUIRE(padding->is_object(),
                    kInvalidArgument,
                    "plan.padding is ",
                    json_excerpt(*padding),
                    ", wanted an object of node names and multiples");
    for (const auto& [node, multiple] : padding->items()) {
      const std::string where = concat("plan.padding['", node, "']");
      plan.padding[node] = ObjectReader::value<int64_t>(multiple, where);
      constexpr int64_t kMostPadded = 1024;  // more than the tiles of any matrix unit
      TRAINRT_REQUIRE(plan.padding[node] >= 1 && plan.padding[node] <= kMostPadded,
                      kInvalidArgument,
                      where,
                      " is ",
                      plan.padding[node],
                      ", wanted a multiple from 1 to ",
                      kMostPadded);
    }
  }
  check_ranges(plan);
  check_devices(plan);
  count_micro_batches(plan);
  return plan;
}

Plan single_device_plan(int64_t global_batch, int64_t micro_batch_size, int num_graph_nodes) {
  Plan plan;
  plan.global_batch = global_batch;
  plan.shares = make_shares(global_batch, 1, micro_batch_size, {});
  plan.micro_batch_size = plan.shares[0].micro_batch_size;
  plan.devices = {{0, "localhost", "cpu:0"}};
  plan.stages = {{0, 0, 0, std::max(0, num_graph_nodes - 1), RecomputeMode::kNone, {}}};
  return plan;
}

}  // namespace trainrt
