// Predictions against measurements: prices each measured row's model under its layout and sums up
// error, bias, regret and rank correlation.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/step_cost.h"
#include "planner/validation_rows.h"

namespace trainrt {

struct RowResult {
  MeasuredRow row;
  double predicted_seconds = 0;
  double predicted_memory = 0;
  bool fits = true;
  StepBreakdown breakdown;
  double error() const { return predicted_seconds / row.seconds - 1; }
};

struct FileResult {
  std::string file;
  int rows = 0;
  int used = 0;
  double mape = 0, bias = 0, worst = 0;
  double memory_mape = 0;
  int memory_rows = 0;
  double regret_mean = 0, regret_max = 0;
  int regret_groups = 0;
  double kendall_tau = 0;
  std::vector<RowResult> results;     // of used rows
  std::vector<MeasuredRow> left_out;  // with the reason
  // Runs that ended for want of memory, predicted: `fits` should be false.
  std::vector<RowResult> out_of_memory;
};

// The profile of a model that is no Transformer described by its sizes ("resnet50"), at a
// micro-batch.
using ProfileBuilder =
    std::function<ModelProfile(const MeasuredRow& row, const Engine& engine, int64_t micro_batch)>;

// `efficiency`: figures of the rows' devices that replace their architecture's (DeviceType).
FileResult validate_rows(const std::string& file_name,
                         const std::vector<CsvRow>& table,
                         const std::string& engine_name,
                         const ProfileBuilder& other_models,
                         const std::map<std::string, double>& efficiency = {});

// One row, alike.
RowResult predict_row(const MeasuredRow& row,
                      const Engine& engine,
                      const ProfileBuilder& other_models,
                      const std::map<std::string, double>& efficiency = {});

// The topology that a row describes.
Topology topology_of_row(const MeasuredRow& row);

}  // namespace trainrt
