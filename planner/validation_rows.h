// Measured rows of published tables (CONTRACT section 4), in one form.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "parallel/csv.h"
#include "parallel/plan.h"
#include "planner/transformer_profile.h"

namespace trainrt {

// One row. Fields that the table leaves open are nullopt and for the planner to fill in.
struct MeasuredRow {
  std::string id;
  std::string unusable;  // why it cannot be used; empty when it can
  std::string model;     // "transformer", or the builder's name ("resnet50", "bert-large")
  TransformerShape shape;
  std::string precision = "bf16";
  std::string device;  // as written; "V100*12+T4*4" for mixed clusters
  int num_devices = 0;
  int devices_per_host = 0;  // 0: the catalogue's
  double host_network = 0;   // bytes/s per direction; 0: the catalogue's
  std::string network;       // link type between hosts; empty: the catalogue's
  int64_t global_batch = 0;
  std::optional<int64_t> micro_batch;
  int tensor = 1, pipeline = 1, data = 1;
  std::optional<int> virtual_stages;
  std::optional<int> zero_stage;
  std::optional<bool> sequence_parallel;
  std::optional<RecomputeMode> recompute;
  std::optional<SelectiveRecompute> selective;  // where the table says which
  std::optional<ScheduleKind> schedule;
  std::vector<int> layers_per_stage;  // when the table states the cut
  bool channels_first = false;        // images are kept so (NCHW)
  bool compiled = false;              // the engine's kernels were fused by a compiler
  bool fused_loss = false;            // by a kernel that keeps no copy of the logits
  bool overlap = true;                // false: communication was not run beside compute
  // Bytes/s that the source states for hosts of a device type, where they differ from the
  // catalogue.
  std::map<std::string, double> intra_bandwidth, inter_bandwidth;
  double seconds = 0;              // measured step; 0: none
  double memory_bytes = 0;         // measured peak; 0: none
  bool with_context = false;       // the peak is of the device, context and libraries included
  bool ran_out_of_memory = false;  // instead of a time
  std::string group;               // regret group; empty: none
};

std::vector<MeasuredRow> read_measured_rows(const std::string& file_name,
                                            const std::vector<CsvRow>& table);

// The engine whose habits the data's README names for a file; "trainrt" for unknown files.
std::string engine_of_file(const std::string& file_name);

}  // namespace trainrt
