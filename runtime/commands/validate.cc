// `trainrt validate`: predictions against tables of measured steps.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "graph/onnx_export.h"
#include "graph/onnx_import.h"
#include "models/model.h"
#include "planner/calibrate.h"
#include "planner/error_bands.h"
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
  const ModelProfile& profile(const MeasuredRow& row, int64_t micro_batch) {
    const std::string key = concat(row.model,
                                   "/",
                                   row.shape.seq,
                                   "/",
                                   row.device,
                                   "/",
                                   row.precision,
                                   "/",
                                   row.channels_first,
                                   "/",
                                   micro_batch);
    const auto found = profiles_.find(key);
    return found != profiles_.end() ? found->second
                                    : profiles_.emplace(key, build(row, micro_batch)).first->second;
  }

 private:
  ModelProfile build(const MeasuredRow& row, int64_t micro_batch) {
    const OnnxModel& model = load(row);
    BindOptions bind;
    bind.batch = micro_batch;
    TrainingSpec spec;
    Graph forward = model.bind(bind);
    spec.loss = resolve_loss(forward, {}, nullptr);
    const TrainingGraph graph = build_training_graph(std::move(forward), spec);
    const ModelBlocks blocks = model_blocks(graph, micro_batch);
    const Topology topology = topology_of_row(row);
    const CostModel cost(topology.type_of(0), row.precision);
    const GroupLinks group = group_links(topology, {0}, 1);
    GraphProfileRequest request;
    request.model = &blocks;
    request.cost = &cost;
    request.tensor_group = &group;
    request.float_bytes = row.precision == "tf32" ? 4 : 2;
    request.rearranges_images = row.channels_first;
    return graph_profile(request).profile;
  }

  const OnnxModel& load(const MeasuredRow& row) {
    const std::string key = concat(row.model, "-", row.shape.seq);
    auto found = models_.find(key);
    if (found == models_.end()) {
      ModelSpec spec = named_model(row.model);
      spec.seq = row.shape.seq > 0 ? row.shape.seq : spec.seq;
      if (row.model == "bert-large") {
        // NVIDIA's example has logits for the masked tokens alone, 20 of 128: as many as a
        // vocabulary of that share has for all.
        spec.vocab = 30522 * 20 / 128;
      }
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
  std::map<std::string, ModelProfile> profiles_;
};

std::string as_json(const std::vector<FileResult>& results) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const FileResult& r : results) {
    nlohmann::ordered_json left_out = nlohmann::ordered_json::array();
    for (const MeasuredRow& row : r.left_out) {
      left_out.push_back({{"row", row.id}, {"reason", row.unusable}});
    }
    nlohmann::ordered_json residuals = nlohmann::ordered_json::array();
    for (const RowResult& result : r.results) {
      residuals.push_back({{"row", result.row.id},
                           {"measured_seconds", result.row.seconds},
                           {"predicted_seconds", result.predicted_seconds},
                           {"error", result.error()}});
    }
    nlohmann::ordered_json out_of_memory = nlohmann::ordered_json::array();
    for (const RowResult& result : r.out_of_memory) {
      out_of_memory.push_back({{"row", result.row.id}, {"predicted_to_fit", result.fits}});
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
                    {"residuals", residuals},
                    {"out_of_memory", out_of_memory},
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

// Fits to the usable rows of all files together.
Calibration fit_rows(const std::vector<FileResult>& results,
                     const Engine& engine,
                     const ProfileBuilder& other_models) {
  std::vector<MeasuredRow> rows;
  for (const FileResult& file : results) {
    for (const RowResult& result : file.results) {
      rows.push_back(result.row);
    }
  }
  return calibrate(rows, engine, other_models);
}

int validate_command(const Options& options) {
  TRAINRT_REQUIRE(options.calibrate.empty() || options.convention != "auto",
                  kInvalidArgument,
                  "--calibrate fits the rows of one engine: name it with --convention");
  BuiltModels models;
  const ProfileBuilder other_models = [&](const MeasuredRow& row, const Engine&, int64_t batch) {
    return models.profile(row, batch);
  };
  std::vector<FileResult> results;
  for (const std::string& path : options.arguments) {
    const std::string name = std::filesystem::path(path).filename().string();
    results.push_back(
        validate_rows(name,
                      parse_csv(read_text(path), path),
                      options.convention == "auto" ? engine_of_file(name) : options.convention,
                      other_models));
  }
  std::string text = options.format == "json" ? as_json(results) : as_text(results);
  if (!options.bands.empty()) {
    write_file_atomically(options.bands,
                          [&](std::ostream& out) { out << error_bands_csv(results); });
  }
  if (!options.calibrate.empty()) {
    const Calibration fitted = fit_rows(results, find_engine(options.convention), other_models);
    write_file_atomically(options.calibrate,
                          [&](std::ostream& out) { out << calibrated_cluster(fitted); });
    if (options.format == "json") {
      std::fputs(calibration_text(fitted).c_str(), stderr);
    } else {
      text += calibration_text(fitted);
    }
  }
  write_result(text, options);
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
