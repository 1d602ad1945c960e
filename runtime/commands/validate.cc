// `trainrt validate`: predictions against tables of measured steps.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "graph/onnx_export.h"
#include "graph/onnx_import.h"
#include "models/model.h"
#include "planner/graph_profile.h"
#include "planner/validation.h"
#include "runtime/commands/command.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

std::string read_text(const std::string& path) {
  const std::vector<std::byte> bytes = read_file(path);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Models that are no plain Transformer are built, imported and profiled like a user's file.
class BuiltModels {
 public:
  ModelProfile profile(const MeasuredRow& row, const Engine& engine, int64_t micro_batch) {
    (void)engine;
    const OnnxModel& model = load(row);
    BindOptions bind;
    bind.batch = micro_batch;
    TrainingSpec spec;
    Graph forward = model.bind(bind);
    spec.loss = resolve_loss(forward, {}, nullptr);
    const TrainingGraph graph = build_training_graph(std::move(forward), spec);
    const BlockList blocks = find_blocks(graph.graph);
    const Topology topology = topology_of_row(row);
    const CostModel cost(topology.type_of(0), row.precision);
    const GroupLinks group = group_links(topology, {0}, 1);
    GraphProfileRequest request;
    request.graph = &graph;
    request.blocks = &blocks;
    request.cost = &cost;
    request.tensor_group = &group;
    request.micro_batch = micro_batch;
    request.float_bytes = row.precision == "tf32" ? 4 : 2;
    return graph_profile(request).profile;
  }

 private:
  const OnnxModel& load(const MeasuredRow& row) {
    const std::string key = concat(row.model, "-", row.shape.seq);
    auto found = models_.find(key);
    if (found == models_.end()) {
      ModelSpec spec = named_model(row.model);
      spec.seq = row.shape.seq > 0 ? row.shape.seq : spec.seq;
      const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                         concat("trainrt-validate-", key, "-", ::getpid(), ".onnx");
      ExportOptions write;
      write.external_weights = true;
      write.write_weights = false;
      write_onnx(build_model(spec, 1), path.string(), write);
      auto model = std::make_unique<OnnxModel>(OnnxModel::load(path.string()));
      std::filesystem::remove(path);
      found = models_.emplace(key, std::move(model)).first;
    }
    return *found->second;
  }

  std::map<std::string, std::unique_ptr<OnnxModel>> models_;
};

std::string as_json(const std::vector<FileResult>& results) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const FileResult& r : results) {
    nlohmann::ordered_json left_out = nlohmann::ordered_json::array();
    for (const MeasuredRow& row : r.left_out) {
      left_out.push_back({{"row", row.id}, {"reason", row.unusable}});
    }
    json.push_back({{"file", r.file},
                    {"rows", r.rows},
                    {"used", r.used},
                    {"mape", r.mape},
                    {"bias", r.bias},
                    {"worst", r.worst},
                    {"memory_mape", r.memory_mape},
                    {"regret_mean", r.regret_mean},
                    {"regret_max", r.regret_max},
                    {"kendall_tau", r.kendall_tau},
                    {"left_out", left_out}});
  }
  return json.dump(1) + "\n";
}

std::string as_text(const std::vector<FileResult>& results) {
  std::string text =
      "file                              rows  used   mape   bias  worst  memory  regret    max   "
      "tau\n";
  for (const FileResult& r : results) {
    char line[256];
    std::snprintf(line,
                  sizeof(line),
                  "%-32s %5d %5d %5.1f%% %+5.1f%% %5.1f%% %6.1f%% %6.1f%% %5.1f%% %5.2f\n",
                  r.file.c_str(),
                  r.rows,
                  r.used,
                  100 * r.mape,
                  100 * r.bias,
                  100 * r.worst,
                  100 * r.memory_mape,
                  100 * r.regret_mean,
                  100 * r.regret_max,
                  r.kendall_tau);
    text += line;
  }
  for (const FileResult& r : results) {
    std::map<std::string, int> reasons;
    for (const MeasuredRow& row : r.left_out) {
      ++reasons[row.unusable];
    }
    for (const auto& [reason, count] : reasons) {
      text += concat("  ", r.file, ": ", count, " rows left out: ", reason, "\n");
    }
  }
  return text;
}

int validate_command(const Options& options) {
  BuiltModels models;
  std::vector<FileResult> results;
  for (const std::string& path : options.arguments) {
    const std::string name = std::filesystem::path(path).filename().string();
    results.push_back(
        validate_rows(name,
                      parse_csv(read_text(path), path),
                      options.convention,
                      [&](const MeasuredRow& row, const Engine& engine, int64_t micro_batch) {
                        return models.profile(row, engine, micro_batch);
                      }));
  }
  write_result(options.format == "json" ? as_json(results) : as_text(results), options);
  return 0;
}

const RegisterCommand kValidate{{
    .name = "validate",
    .arguments = "F.csv...",
    .summary = "predictions against measured rows",
    .groups = kValidateOptions | kFormatOptions | kOutputOptions,
    .min_arguments = 1,
    .max_arguments = -1,
    .run = validate_command,
}};

}  // namespace

}  // namespace trainrt
