// One reader for the shared columns, and one for each table in a form of its own. A cell's
// qualifier after a blank or parenthesis is dropped ("2 (FSDP ...)", "1F1B (DeepSpeed)").
#include "planner/validation_rows.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "parallel/device_catalogue.h"

namespace trainrt {

namespace {

class Cells {
 public:
  explicit Cells(const CsvRow& row) : row_(row) {}

  std::string text(const std::string& column) const {
    const auto found = row_.find(column);
    return found == row_.end() ? "" : found->second;
  }
  std::string word(const std::string& column) const {
    const std::string cell = text(column);
    return cell.substr(0, cell.find_first_of(" ("));
  }
  double number(const std::string& column, double missing = 0) const {
    const std::string cell = word(column);
    if (cell.empty() || !(std::isdigit(static_cast<unsigned char>(cell[0])) || cell[0] == '.')) {
      return missing;
    }
    return std::stod(cell);
  }
  int64_t integer(const std::string& column, int64_t missing = 0) const {
    return static_cast<int64_t>(std::llround(number(column, static_cast<double>(missing))));
  }
  bool has(const std::string& column) const { return !word(column).empty(); }

 private:
  const CsvRow& row_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

// "GPT" families keep GELU, biases and a tied head; Llama and Nemotron do not.
void read_family(const std::string& model, TransformerShape* shape) {
  const std::string name = lower(model);
  if (contains(name, "llama")) {
    shape->gated = true;
    shape->bias = false;
    shape->dropout = false;
    shape->tied_head = false;
  } else if (contains(name, "mpt")) {
    shape->bias = false;
    shape->dropout = false;
  }
}

void read_shape(const Cells& cells, MeasuredRow* row) {
  TransformerShape& shape = row->shape;
  shape.layers = cells.integer("layers");
  shape.hidden = cells.integer("hidden");
  shape.heads = cells.integer("heads");
  shape.seq = cells.integer("seq");
  shape.vocab = cells.integer("vocab", 51200);
  shape.kv_heads = cells.integer("kv_heads", shape.heads);
  read_family(cells.text("model"), &shape);
  shape.ffn = cells.integer("ffn", 4 * shape.hidden);
  row->model = "transformer";
  const std::pair<const char*, int64_t> needed[] = {{"layers", shape.layers},
                                                    {"hidden", shape.hidden},
                                                    {"heads", shape.heads},
                                                    {"seq", shape.seq}};
  for (const auto& [name, value] : needed) {
    if (value <= 0 && row->unusable.empty()) {
      row->unusable = concat(name, " is not stated");
    }
  }
}

void read_precision(const std::string& cell, MeasuredRow* row) {
  const std::string text = lower(cell);
  if (contains(text, "fp8") || contains(text, "float8")) {
    row->unusable = "fp8 is not offered";
  }
  row->precision = contains(text, "fp16") || contains(text, "fp16 mixed") ? "fp16" : "bf16";
  if (text == "tf32") {
    row->precision = "tf32";
  }
}

void read_schedule(const std::string& cell, MeasuredRow* row) {
  const std::string text = lower(cell);
  if (contains(text, "zb-1p") || contains(text, "zb-2p") || contains(text, "zb-h2")) {
    row->unusable = "schedule " + cell + " is not offered";
  } else if (contains(text, "zb-h1")) {
    row->schedule = ScheduleKind::kZeroBubbleH1;
  } else if (contains(text, "interleaved") || contains(text, "1f1b-i")) {
    if (!contains(text, "where stated")) {
      row->schedule = ScheduleKind::kInterleaved;
    }
  } else if (text.starts_with("1f1b")) {
    row->schedule = ScheduleKind::k1F1B;
  }
}

void read_recompute(const std::string& cell, MeasuredRow* row) {
  if (cell.starts_with("full")) {
    row->recompute = RecomputeMode::kFull;
  } else if (cell.starts_with("selective")) {
    row->recompute = RecomputeMode::kSelective;
    if (contains(cell, "(op)")) {
      row->selective = SelectiveRecompute::kEverySecondProduct;
    } else if (contains(cell, "(layer)")) {
      row->selective = SelectiveRecompute::kEverySecondLayer;
    }
  } else if (cell.starts_with("none")) {
    row->recompute = RecomputeMode::kNone;
  }
}

// Any one of tp, pp, dp may follow from the other two and the device count.
void read_degrees(const Cells& cells, bool pure_data_parallel, MeasuredRow* row) {
  int64_t tp = cells.integer("tp"), pp = cells.integer("pp"), dp = cells.integer("dp");
  row->num_devices = static_cast<int>(cells.integer("gpus"));
  if (pure_data_parallel) {
    tp = std::max<int64_t>(tp, 1);
    pp = std::max<int64_t>(pp, 1);
  }
  if (row->num_devices == 0) {
    row->num_devices = static_cast<int>(tp * pp * dp);
  }
  const int64_t n = row->num_devices;
  if (dp == 0 && tp > 0 && pp > 0 && n % (tp * pp) == 0) {
    dp = n / (tp * pp);
  } else if (pp == 0 && tp > 0 && dp > 0 && n % (tp * dp) == 0) {
    pp = n / (tp * dp);
  } else if (tp == 0 && pp > 0 && dp > 0 && n % (pp * dp) == 0) {
    tp = n / (pp * dp);
  }
  if (row->unusable.empty()) {
    if (n == 0) {
      row->unusable = "the number of devices is not stated";
    } else if (tp == 0 || pp == 0 || dp == 0) {
      row->unusable = "the layout (tp, pp, dp) is not stated";
    } else if (cells.integer("cp", 1) > 1) {
      row->unusable = "context parallelism is not offered";
    } else if (tp * pp * dp != n) {
      row->unusable = concat("tp * pp * dp = ", tp * pp * dp, " is not the ", n, " devices stated");
    }
  }
  row->tensor = static_cast<int>(std::max<int64_t>(tp, 1));
  row->pipeline = static_cast<int>(std::max<int64_t>(pp, 1));
  row->data = static_cast<int>(std::max<int64_t>(dp, 1));
}

// Narayanan et al. 2021, equation 3: hardware FLOPs of a step with full recompute.
double hardware_flops(const TransformerShape& s, double batch) {
  const double h = static_cast<double>(s.hidden), seq = static_cast<double>(s.seq);
  const double l = static_cast<double>(s.layers), v = static_cast<double>(s.vocab);
  return 96 * batch * seq * l * h * h * (1 + seq / (6 * h) + v / (16 * l * h));
}

void read_time(const Cells& cells, MeasuredRow* row) {
  const double batch = static_cast<double>(row->global_batch);
  if (cells.number("iter_s") > 0) {
    row->seconds = cells.number("iter_s");
  } else if (cells.number("tok_s_gpu") > 0) {
    row->seconds = batch * static_cast<double>(row->shape.seq) /
                   (cells.number("tok_s_gpu") * row->num_devices);
  } else if (cells.number("tflops_gpu") > 0) {
    const bool model = contains(cells.text("tflops_kind"), "model");
    const double flops =
        model ? batch * transformer_model_flops(row->shape) : hardware_flops(row->shape, batch);
    row->seconds = flops / (cells.number("tflops_gpu") * 1e12 * row->num_devices);
  }
  if (row->seconds <= 0 && row->unusable.empty()) {
    row->unusable = "no time or rate is stated";
  }
}

// The date that a note ends or begins with ("after PCIe/NUMA fix; 02-25 too close to OOM").
std::string note_date(const std::string& notes) {
  for (size_t i = 0; i + 5 <= notes.size(); ++i) {
    if (std::isdigit(static_cast<unsigned char>(notes[i])) &&
        std::isdigit(static_cast<unsigned char>(notes[i + 1])) && notes[i + 2] == '-' &&
        std::isdigit(static_cast<unsigned char>(notes[i + 3])) &&
        std::isdigit(static_cast<unsigned char>(notes[i + 4]))) {
      return notes.substr(i, 5);
    }
  }
  return "";
}

void set_group(const std::string& notes, MeasuredRow* row) {
  const TransformerShape& s = row->shape;
  row->group = concat(s.layers,
                      "/",
                      s.hidden,
                      "/",
                      s.heads,
                      "/",
                      s.ffn,
                      "/",
                      s.vocab,
                      "/",
                      s.seq,
                      "/",
                      row->global_batch,
                      "/",
                      row->num_devices,
                      "/",
                      row->device,
                      "/",
                      note_date(notes));
}

bool is_data_parallel_file(const std::string& file) {
  return contains(file, "llmfoundry") || contains(file, "llmc") || contains(file, "vision");
}

MeasuredRow read_shared(const std::string& file, const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  read_precision(cells.text("precision"), &row);
  read_shape(cells, &row);
  read_degrees(cells, is_data_parallel_file(file), &row);
  row.device = cells.text("gpu");
  row.devices_per_host = static_cast<int>(cells.integer("gpus_per_node"));
  row.host_network = cells.number("inter_gbps_per_node") * 1e9 / 8;
  if (contains(cells.text("source"), "bigscience")) {
    row.network = "omni-path-100";  // Jean Zay
    row.with_context = true;        // read with nvidia-smi
  }
  row.global_batch = cells.integer("gbs");
  if (cells.integer("mbs") > 0) {
    row.micro_batch = cells.integer("mbs");
  }
  if (cells.has("vpp")) {
    row.virtual_stages = static_cast<int>(cells.integer("vpp", 1));
  }
  if (cells.has("zero")) {
    row.zero_stage = static_cast<int>(cells.integer("zero"));
  }
  if (cells.has("sp")) {
    row.sequence_parallel = cells.word("sp") == "yes";
  }
  read_recompute(cells.text("recompute"), &row);
  read_schedule(cells.text("schedule"), &row);
  if (row.global_batch <= 0 && row.unusable.empty()) {
    row.unusable = "the global batch is not stated";
  }
  if (!match_device(row.device).has_value() && row.unusable.empty()) {
    row.unusable = "device '" + row.device + "' is not in the catalogue";
  }
  row.compiled = contains(cells.text("notes"), "torch.compile");
  read_time(cells, &row);
  row.memory_bytes = cells.number("mem_gib") * 1073741824.0;
  set_group(cells.text("notes"), &row);
  return row;
}

MeasuredRow read_zero_bubble(const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  read_schedule(cells.text("schedule"), &row);
  read_shape(cells, &row);
  read_degrees(cells, false, &row);
  row.precision = "bf16";
  row.device = cells.text("gpu");
  row.devices_per_host = 8;
  row.micro_batch = cells.integer("mbs");
  row.global_batch = cells.integer("microbatches") * *row.micro_batch;
  row.zero_stage = 0;
  row.sequence_parallel = false;
  row.recompute = RecomputeMode::kNone;
  // The first and last stage hold one layer fewer; the interleaved rows use one layer per part.
  const int inner = static_cast<int>((row.shape.layers + 2) / row.pipeline);
  if (row.schedule == ScheduleKind::kInterleaved) {
    row.virtual_stages = inner;
    row.layers_per_stage.assign(static_cast<size_t>(row.pipeline) * static_cast<size_t>(inner), 1);
  } else {
    row.virtual_stages = 1;
    row.layers_per_stage.assign(static_cast<size_t>(row.pipeline), inner);
  }
  row.layers_per_stage.front() -= 1;
  row.layers_per_stage.back() -= 1;
  const double rate = cells.number("samples_per_gpu_s");
  if (rate > 0) {
    row.seconds = static_cast<double>(row.global_batch) / (rate * row.num_devices);
  } else if (row.unusable.empty()) {
    row.unusable = "no time or rate is stated";
  }
  row.memory_bytes = cells.number("peak_mem_gb") * 1e9;
  return row;
}

MeasuredRow read_simumax(const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  if (contains(cells.text("model"), "DeepSeek")) {
    row.unusable = "mixture of experts is not offered";
  }
  read_shape(cells, &row);
  if (cells.integer("ep", 1) > 1) {
    row.unusable = "mixture of experts is not offered";
  }
  read_degrees(cells, false, &row);
  row.precision = "bf16";
  row.device = cells.text("gpu");
  row.global_batch = cells.integer("gbs");
  row.micro_batch = cells.integer("mbs");
  row.zero_stage = static_cast<int>(cells.integer("zero"));
  row.virtual_stages = 1;
  row.schedule = ScheduleKind::k1F1B;
  row.sequence_parallel = row.tensor > 1;
  row.recompute = RecomputeMode::kNone;
  row.fused_loss = cells.text("source_loc").ends_with("_cef");
  row.overlap = false;  // its launch scripts turn overlap off
  row.seconds = cells.number("measured_ms") / 1e3;
  row.memory_bytes = cells.number("measured_alloc_gib") * 1073741824.0;
  set_group("", &row);
  return row;
}

// "7L:4x[GH-96*4] ; 9L:4x[GH-96*4]": layers, embedding and head counted as one each.
std::vector<int> sailor_layers(const std::string& stages) {
  std::vector<int> layers;
  std::istringstream in(stages);
  std::string stage;
  while (std::getline(in, stage, ';')) {
    layers.push_back(std::stoi(stage));
  }
  return layers;
}

MeasuredRow read_sailor(const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  read_shape(cells, &row);
  read_degrees(cells, false, &row);
  // Not stated. The memory of a sample is that of 32-bit activations, and NVIDIA's containers,
  // which the authors name, compute 32-bit products as TF32. Its attention has no dropout.
  row.precision = "tf32";
  row.shape.dropout = false;
  row.device = cells.text("gpu_types");
  row.devices_per_host = 4;
  row.global_batch = cells.integer("gbs");
  row.micro_batch = cells.integer("mbs");
  row.zero_stage = 0;
  row.virtual_stages = 1;
  row.schedule = ScheduleKind::k1F1B;
  row.sequence_parallel = false;
  row.recompute = RecomputeMode::kNone;
  row.layers_per_stage = sailor_layers(cells.text("stages"));
  row.layers_per_stage.front() -= 1;  // the embedding
  row.layers_per_stage.back() -= 1;   // the head
  row.seconds = cells.number("iter_s");
  row.memory_bytes = cells.number("peak_mem_gib") * 1073741824.0;
  set_group("", &row);
  return row;
}

// "0 15 30": boundaries over 30 pseudo-layers, two before the 24 layers and four after.
MeasuredRow read_amp(const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  CsvRow copy;
  read_shape(cells, &row);
  row.unusable.clear();
  row.shape.heads = 16;  // GPT-2 345M; the table leaves it out
  row.shape.kv_heads = 16;
  read_degrees(cells, false, &row);
  row.precision = "fp16";
  row.device = cells.text("gpu_types");
  row.devices_per_host = 4;
  row.network = "ethernet-10g";
  // "50 Gbit/s inter, 50 Gbit/s intra": T4 hosts have no path between cards but the host's.
  row.intra_bandwidth = {{"T4", 50e9 / 8}, {"V100", 170e9 / 8}};
  row.inter_bandwidth = {{"T4", 50e9 / 8}, {"V100", 10e9 / 8}};
  row.global_batch = cells.integer("gbs");
  row.micro_batch = cells.integer("mbs");
  row.zero_stage = 0;
  row.virtual_stages = 1;
  row.schedule = ScheduleKind::k1F1B;
  row.sequence_parallel = false;
  row.recompute = RecomputeMode::kFull;  // DeepSpeed's pipeline example checkpoints every layer
  std::istringstream in(cells.text("partition"));
  std::vector<int> bounds;
  for (int bound = 0; in >> bound;) {
    bounds.push_back(std::clamp(bound - 2, 0, 24));
  }
  for (size_t i = 1; i < bounds.size(); ++i) {
    row.layers_per_stage.push_back(bounds[i] - bounds[i - 1]);
  }
  if (cells.text("measured_failed") == "yes") {
    row.unusable = "the measured run failed";
  }
  row.seconds = cells.number("measured_iter_s");
  if (row.seconds <= 0 && row.unusable.empty()) {
    row.unusable = "no time or rate is stated";
  }
  set_group("", &row);
  return row;
}

MeasuredRow read_vision(const Cells& cells) {
  MeasuredRow row;
  row.id = cells.text("row_id");
  row.model = contains(cells.text("model"), "ResNet") ? "resnet50" : "bert-large";
  row.shape.seq = contains(cells.text("input"), "512") ? 512 : 128;
  row.precision = cells.text("precision") == "TF32" ? "tf32" : "fp16";
  row.channels_first = cells.text("layout") == "NCHW";
  row.device = cells.text("gpu");
  row.num_devices = static_cast<int>(cells.integer("gpus"));
  row.data = row.num_devices;
  row.micro_batch = cells.integer("batch_per_gpu");
  row.zero_stage = 0;
  row.virtual_stages = 1;
  row.schedule = ScheduleKind::k1F1B;
  row.recompute = RecomputeMode::kNone;
  int64_t accumulation = 1;
  const std::string notes = cells.text("notes");
  const size_t at = notes.find("accumulation ");
  if (at != std::string::npos) {
    accumulation = std::stoll(notes.substr(at + 13));
  }
  row.global_batch = *row.micro_batch * row.num_devices * accumulation;
  const double rate = cells.number("throughput");
  row.seconds = rate > 0 ? static_cast<double>(row.global_batch) / rate : 0;
  if (rate <= 0) {
    row.unusable = "no time or rate is stated";
  } else if (row.shape.seq == 512) {
    // NVIDIA's second phase sorts its sentences into bins of 64 tokens (its data folder is named
    // bin_size_64); at 512 tokens each the stated rates would be 70 % of the device's peak.
    row.unusable = "sequences of up to 512 tokens in bins: their length is not stated";
  }
  return row;
}

// The table's form shows by a column that only it has.
MeasuredRow read_row(const std::string& file_name, const CsvRow& entry, const Cells& cells) {
  if (entry.count("samples_per_gpu_s") != 0) {
    return read_zero_bubble(cells);
  }
  if (entry.count("simumax_pred_ms") != 0) {
    return read_simumax(cells);
  }
  if (entry.count("grad_reduce_s") != 0) {
    return read_sailor(cells);
  }
  if (entry.count("amp_predicted_s") != 0) {
    return read_amp(cells);
  }
  if (entry.count("batch_per_gpu") != 0) {
    return read_vision(cells);
  }
  if (entry.count("gbs") != 0) {
    return read_shared(file_name, cells);
  }
  MeasuredRow row;
  row.unusable = "no step of a training run is described by these columns";
  return row;
}

}  // namespace

std::vector<MeasuredRow> read_measured_rows(const std::string& file_name,
                                            const std::vector<CsvRow>& table) {
  std::vector<MeasuredRow> rows;
  for (const CsvRow& entry : table) {
    const Cells cells(entry);
    MeasuredRow row = read_row(file_name, entry, cells);
    const std::string notes = lower(cells.text("notes"));
    if (row.unusable.empty() && (contains(notes, "doubtful") || contains(notes, "do not use"))) {
      row.unusable = "the table's notes doubt this row";
    }
    row.ran_out_of_memory = row.seconds <= 0 && notes.starts_with("oom");
    if (row.ran_out_of_memory) {
      row.unusable = "the measured run was out of memory";
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string engine_of_file(const std::string& file_name) {
  const std::pair<const char*, const char*> kEngines[] = {
      {"nemo", "megatron"},
      {"megatron", "megatron"},
      {"korthikanti", "megatron"},
      {"vtrain", "megatron"},
      {"zero_bubble", "megatron"},
      {"simumax", "megatron"},
      {"bigscience", "deepspeed"},
      {"sailor", "deepspeed"},
      {"amp_", "deepspeed"},
      {"torchtitan", "fsdp"},
      {"llmfoundry", "fsdp"},
  };
  for (const auto& [part, engine] : kEngines) {
    if (contains(file_name, part)) {
      return engine;
    }
  }
  return "trainrt";
}

}  // namespace trainrt
