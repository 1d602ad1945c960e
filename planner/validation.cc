// Fields a row leaves open take the value that is fastest among those predicted to fit. Regret:
// within a group of rows that differ in layout only, how much slower than the best measured layout
// is the one we would have chosen. Kendall's tau over all pairs of a group, pairs summed over
// groups.
#include "planner/validation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "graph/base/error.h"
#include "parallel/device_catalogue.h"
#include "planner/stage_partition.h"

namespace trainrt {

namespace {

// "V100*12+T4*4"
std::vector<std::pair<std::string, int>> device_counts(const MeasuredRow& row) {
  std::vector<std::pair<std::string, int>> counts;
  if (row.device.find('*') == std::string::npos) {
    return {{row.device, row.num_devices}};
  }
  std::istringstream in(row.device);
  std::string part;
  while (std::getline(in, part, '+')) {
    const size_t star = part.find('*');
    counts.emplace_back(part.substr(0, star), std::stoi(part.substr(star + 1)));
  }
  return counts;
}

// Layers of each virtual stage -> its first block. The embedding goes with the first, the head with
// the last; `layers` is laid out by virtual stage.
std::vector<int> cuts_of(const std::vector<int>& layers) {
  std::vector<int> first = {0};
  int next = 1;
  for (size_t i = 0; i + 1 < layers.size(); ++i) {
    next += layers[i];
    first.push_back(next);
  }
  return first;
}

struct Open {  // what the row leaves to the planner
  std::vector<int64_t> micro_batches;
  std::vector<int> virtual_stages;
  std::vector<RecomputeMode> recompute;
};

Open open_fields(const MeasuredRow& row) {
  Open open;
  const int64_t per_rank = std::max<int64_t>(1, row.global_batch / row.data);
  if (row.micro_batch.has_value()) {
    open.micro_batches = {*row.micro_batch};
  } else {
    for (int64_t b = 1; b <= 16; b *= 2) {
      if (per_rank % b == 0) {
        open.micro_batches.push_back(b);
      }
    }
  }
  const int64_t layers = std::max<int64_t>(row.shape.layers, 1);
  if (row.virtual_stages.has_value()) {
    open.virtual_stages = {*row.virtual_stages};
  } else {
    open.virtual_stages = {1};
    const bool may_interleave =
        row.pipeline > 1 &&
        row.schedule.value_or(ScheduleKind::kInterleaved) == ScheduleKind::kInterleaved;
    for (int v = 2; may_interleave && v <= 8; ++v) {
      if (layers % (static_cast<int64_t>(row.pipeline) * v) == 0) {
        open.virtual_stages.push_back(v);
      }
    }
  }
  if (row.recompute.has_value()) {
    open.recompute = {*row.recompute};
  } else {
    open.recompute = {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull};
  }
  return open;
}

class RowPricer {
 public:
  RowPricer(const MeasuredRow& row,
            const Engine& engine,
            const ProfileBuilder& other_models,
            const std::map<std::string, double>& efficiency)
      : row_(row), engine_(engine), other_models_(other_models), topology_(topology_of_row(row)) {
    for (DeviceType& type : topology_.types) {
      type.efficiency = efficiency;
    }
    const std::string& architecture = topology_.types[0].architecture;
    if (engine.name == "megatron" && (architecture == "hopper" || architecture == "blackwell")) {
      engine_ = find_engine("megatron-core");  // what Megatron is since such devices exist
    }
    if (row.compiled) {
      engine_.fused_elementwise = true;
    }
    engine_.selective = row.selective.value_or(engine_.selective);
    if (row.fused_loss) {
      engine_.fused_loss = true;
    }
    if (!row.overlap) {
      engine_.overlap_gradients = engine_.overlap_gather = engine_.overlap_tensor = false;
    }
    if (element_bytes() == 4) {  // weights are their own masters
      engine_.weight_bytes = engine_.gradient_bytes = engine_.reduce_bytes = 4;
      engine_.optimizer_bytes = 8;
    }
  }

  RowResult run() {
    RowResult best;
    const Open open = open_fields(row_);
    for (const int64_t b : open.micro_batches) {
      const bool sp = row_.sequence_parallel.value_or(row_.tensor > 1);
      const ModelProfile profile =
          row_.model == "transformer"
              ? transformer_profile(row_.shape, engine_, b, row_.tensor, sp, element_bytes())
              : other_models_(row_, engine_, b);
      for (const int v : open.virtual_stages) {
        for (const RecomputeMode recompute : open.recompute) {
          consider(profile, b, v, recompute, &best);
        }
      }
    }
    best.row = row_;
    return best;
  }

 private:
  double element_bytes() const {
    return row_.precision == "tf32" || row_.precision == "fp32" ? 4 : 2;
  }

  void consider(
      const ModelProfile& profile, int64_t b, int v, RecomputeMode recompute, RowResult* best) {
    Layout layout;
    layout.data = row_.data;
    layout.tensor = row_.tensor;
    layout.pipeline = row_.pipeline;
    layout.virtual_stages = v;
    layout.schedule =
        v > 1 ? ScheduleKind::kInterleaved : row_.schedule.value_or(ScheduleKind::k1F1B);
    if (v == 1 && layout.schedule == ScheduleKind::kInterleaved) {
      layout.schedule = ScheduleKind::k1F1B;
    }
    layout.zero_stage = row_.zero_stage.value_or(engine_.name == "fsdp" ? 3 : 0);
    layout.recompute = recompute;
    layout.sequence_parallel = profile.sequence_parallel;
    layout.micro_batch = b;
    const double m = static_cast<double>(row_.global_batch) / (static_cast<double>(b) * row_.data);
    layout.num_micro_batches = {std::max(1, static_cast<int>(std::ceil(m - 1e-9)))};
    layout.last_micro_batch = m < 1 ? m : 1;
    layout.first_block = row_.layers_per_stage.empty()
                             ? even_cuts(profile.num_blocks(), row_.pipeline * v)
                             : cuts_of(row_.layers_per_stage);
    StepRequest request{&profile, {}, &topology_, &engine_, row_.precision, &layout, false};
    const StepPrediction step = predict_step(request);
    const bool better = best->predicted_seconds == 0 || (step.fits() && !best->fits) ||
                        (step.fits() == best->fits && step.seconds < best->predicted_seconds);
    if (better) {
      best->predicted_seconds = step.seconds;
      best->predicted_memory = static_cast<double>(step.peak_bytes());
      if (row_.with_context) {
        best->predicted_memory += static_cast<double>(topology_.types[0].reserved_bytes);
      }
      best->fits = step.fits();
      best->breakdown = step.breakdown;
    }
  }

  const MeasuredRow& row_;
  Engine engine_;
  const ProfileBuilder& other_models_;
  Topology topology_;
};

void summarise_errors(FileResult* file) {
  double sum = 0, absolute = 0, memory = 0;
  for (const RowResult& result : file->results) {
    const double error = result.error();
    sum += error;
    absolute += std::fabs(error);
    file->worst = std::max(file->worst, std::fabs(error));
    if (result.row.memory_bytes > 0) {
      memory += std::fabs(result.predicted_memory / result.row.memory_bytes - 1);
      ++file->memory_rows;
    }
  }
  const double n = std::max<double>(1, static_cast<double>(file->results.size()));
  file->mape = absolute / n;
  file->bias = sum / n;
  file->memory_mape = file->memory_rows > 0 ? memory / file->memory_rows : 0;
}

void summarise_groups(FileResult* file) {
  std::map<std::string, std::vector<const RowResult*>> groups;
  for (const RowResult& result : file->results) {
    if (!result.row.group.empty()) {
      groups[result.row.group].push_back(&result);
    }
  }
  double regret = 0, agree = 0, pairs = 0;
  for (const auto& [key, group] : groups) {
    if (group.size() < 2) {
      continue;
    }
    const RowResult* chosen = group[0];
    double best = group[0]->row.seconds;
    for (const RowResult* result : group) {
      best = std::min(best, result->row.seconds);
      if (result->predicted_seconds < chosen->predicted_seconds) {
        chosen = result;
      }
    }
    const double own = chosen->row.seconds / best - 1;
    regret += own;
    file->regret_max = std::max(file->regret_max, own);
    ++file->regret_groups;
    for (size_t i = 0; i < group.size(); ++i) {
      for (size_t j = i + 1; j < group.size(); ++j) {
        const double a = group[i]->row.seconds - group[j]->row.seconds;
        const double b = group[i]->predicted_seconds - group[j]->predicted_seconds;
        agree += a * b > 0 ? 1 : a * b < 0 ? -1 : 0;
        pairs += 1;
      }
    }
  }
  file->regret_mean = file->regret_groups > 0 ? regret / file->regret_groups : 0;
  file->kendall_tau = pairs > 0 ? agree / pairs : 0;
}

}  // namespace

Topology topology_of_row(const MeasuredRow& row) {
  Topology topology;
  for (const auto& [name, count] : device_counts(row)) {
    // AMP's V100 hosts are p3.8xlarge.
    const CatalogueEntry entry = find_device(name == "V100" ? "V100-SXM2-16GB" : name);
    const int type = topology.add_type(entry.device);
    const int per_host = row.devices_per_host > 0 ? row.devices_per_host : entry.devices_per_host;
    LinkType inter = entry.inter;
    int nics = entry.num_nics;
    if (!row.network.empty()) {
      inter = find_link(row.network);
    }
    if (row.host_network > 0) {  // as many cards as the catalogue's host, at the stated sum
      nics = row.host_network < 100e9 ? std::min(per_host, 4) : per_host;
      inter.bandwidth = row.host_network / nics;
    }
    LinkType intra = entry.intra;
    if (row.intra_bandwidth.count(name) != 0) {
      intra.bandwidth = row.intra_bandwidth.at(name) * intra.bandwidth /
                        effective_intra_bandwidth(intra);  // stated as what a transfer gets
    }
    if (row.inter_bandwidth.count(name) != 0) {
      inter.bandwidth = row.inter_bandwidth.at(name);
      nics = 1;
    }
    for (int left = count; left > 0; left -= per_host) {
      topology.add_host(std::vector<int>(static_cast<size_t>(std::min(left, per_host)), type),
                        intra,
                        inter,
                        nics);
    }
  }
  return topology;
}

RowResult predict_row(const MeasuredRow& row,
                      const Engine& engine,
                      const ProfileBuilder& other_models,
                      const std::map<std::string, double>& efficiency) {
  return RowPricer(row, engine, other_models, efficiency).run();
}

FileResult validate_rows(const std::string& file_name,
                         const std::vector<CsvRow>& table,
                         const std::string& engine_name,
                         const ProfileBuilder& other_models,
                         const std::map<std::string, double>& efficiency) {
  FileResult file;
  file.file = file_name;
  const Engine engine = find_engine(engine_name);
  for (MeasuredRow& row : read_measured_rows(file_name, table)) {
    ++file.rows;
    if (row.unusable.empty() && row.model != "transformer" && !other_models) {
      row.unusable = "no builder for model " + row.model;
    }
    if (row.ran_out_of_memory) {
      file.out_of_memory.push_back(predict_row(row, engine, other_models, efficiency));
    }
    if (!row.unusable.empty()) {
      file.left_out.push_back(std::move(row));
      continue;
    }
    file.results.push_back(predict_row(row, engine, other_models, efficiency));
    ++file.used;
  }
  summarise_errors(&file);
  summarise_groups(&file);
  return file;
}

}  // namespace trainrt
