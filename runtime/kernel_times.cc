// The models' sizes span those that CPUs train: rows of samples and tokens from a handful to some
// thousands, widths from 64 to 1024. Each is run with and without gradient accumulation, as kernels
// differ.
#include "runtime/kernel_times.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <tuple>

#include "graph/onnx_export.h"
#include "models/model.h"
#include "planner/kernel_sample.h"
#include "runtime/compiled_ranks.h"
#include "runtime/data_loader.h"
#include "runtime/executor.h"
#include "runtime/parameter_store.h"
#include "runtime/plan_choice.h"
#include "runtime/training_job.h"

namespace trainrt {

namespace {

using Clock = StepTrace::Clock;

// A kernel's time is its median over the steps. Where there is time, all models are run twice and
// the faster pass counts: other programs only ever add time, and disturb for a while.
constexpr double kSecondsForTwoPasses = 4;
constexpr double kSecondsForAllModels = 1;  // else every third
constexpr int kLeastSteps = 5, kMostSteps = 60;

struct SampleModel {
  ModelSpec spec;
  int64_t micro_batch = 1;
  int64_t micro_batches = 1;
};

std::vector<SampleModel> sample_models() {
  std::vector<SampleModel> models;
  const auto add = [&](const char* family, auto&& size, std::vector<int64_t> micro_batches) {
    ModelSpec spec = named_model(family);
    size(spec);
    for (const int64_t micro_batch : micro_batches) {
      models.push_back({spec, micro_batch, micro_batch == micro_batches.back() ? 1 : 2});
    }
  };
  for (const int64_t hidden : {128, 384, 1024}) {
    add("mlp", [&](ModelSpec& s) { s.hidden = hidden; }, {16, 96, 384});
  }
  for (const int64_t hidden :
       {8, 32}) {  // channels of the first layer; the next have twice as many
    add("cnn",
        [&](ModelSpec& s) {
          s.hidden = hidden;
          s.layers = 3;
        },
        {6, 24, 96});
  }
  const auto gpt = [&](int64_t hidden, int64_t vocab, int64_t seq, std::vector<int64_t> sizes) {
    add(
        "gpt2",
        [&](ModelSpec& s) {
          s.layers = 1;
          s.hidden = hidden;
          s.heads = hidden / 32;
          s.vocab = vocab;
          s.seq = seq;
        },
        std::move(sizes));
  };
  gpt(64, 512, 64, {2, 12, 48});
  gpt(192, 2048, 160, {1, 3, 8});
  gpt(512, 768, 96, {1, 4});
  return models;
}

double median(std::vector<double> values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// A model file of this process, for as long as this lives.
class ModelFile {
 public:
  explicit ModelFile(const ModelSpec& spec)
      : path_((std::filesystem::temp_directory_path() /
               concat("trainrt-profile-", ::getpid(), "-", count_++, ".onnx"))
                  .string()) {
    ExportOptions options;
    options.opset = kModelOpset;
    write_onnx(build_model(spec), path_, options);
  }
  ~ModelFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  ModelFile(const ModelFile&) = delete;
  ModelFile& operator=(const ModelFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  static inline std::atomic<int> count_{0};
  std::string path_;
};

class SampleRun {
 public:
  SampleRun(const SampleModel& model, const DeviceOptions& device, Communicator* world)
      : world_(world), device_(make_cpu_device(world ? world->rank() : 0, device)) {
    const ModelFile file(model.spec);
    Options options;
    options.arguments = {file.path()};
    options.micro_batch_size = model.micro_batch;
    options.batch_size = model.micro_batch * model.micro_batches;
    const TrainingJob job = make_training_job(options, JobUse::kTrain);
    compiled_ = std::move(compile_ranks(
        job, choose_plan(options, job, {device}), {device}, {options.batch_size}, std::nullopt)[0]);
    executor_ = std::make_unique<Executor>(*device_, RankCommunicators{}, job.input_names);
    executor_->add_program(compiled_.programs[0], compiled_.memories[0]);
    executor_->load();
    ParameterStore(*executor_, compiled_.programs[0]->pieces).load_initial();
    LoaderOptions loading;
    loading.batch = loading.stop = options.batch_size;
    DataLoader loader(job.dataset, job.bindings, loading, [&](StepData& step) {
      step.work.micro_batches = compiled_.micro_batches(step.num_samples);
    });
    inputs_ = loader.next()->inputs;
  }

  // A row for each kernel, in order; adds to `gaps` what lies between two.
  std::vector<std::pair<std::string, KernelSample>> run(double for_seconds,
                                                        std::vector<double>& gaps) {
    const Clock::time_point start = Clock::now();
    step();  // pages and primitives
    const double first = std::chrono::duration<double>(Clock::now() - start).count();
    int64_t steps = std::clamp(static_cast<int>(for_seconds / first), kLeastSteps, kMostSteps);
    if (world_ != nullptr) {
      world_->broadcast(&steps, sizeof(steps), 0);
    }
    StepTrace trace(start);
    executor_->set_trace(&trace);
    std::vector<std::vector<double>> seconds;  // by event of a step
    std::vector<TraceEvent> events;
    for (int64_t i = 0; i < steps; ++i) {
      trace.events().clear();
      step();
      std::erase_if(trace.events(),
                    [](const TraceEvent& e) { return e.lane != TraceLane::kOperator; });
      events = trace.events();
      seconds.resize(events.size());
      for (size_t e = 0; e < events.size(); ++e) {
        seconds[e].push_back(events[e].seconds);
        if (e > 0) {
          gaps.push_back(events[e].start_seconds - events[e - 1].start_seconds -
                         events[e - 1].seconds);
        }
      }
    }
    std::vector<std::pair<std::string, KernelSample>> rows;
    for (size_t e = 0; e < events.size(); ++e) {
      auto [name, size] = kernel_of(events[e]);
      size.seconds = median(std::move(seconds[e]));
      rows.emplace_back(std::move(name), size);
    }
    return rows;
  }

 private:
  double step() {
    StepFeed feed;
    feed.step = feed.update = steps_++;
    feed.learning_rate = 1e-4;
    feed.inputs = &inputs_;
    if (world_ != nullptr) {
      world_->barrier();
    }
    const Clock::time_point start = Clock::now();
    executor_->run_step(0, feed);
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  // Under which name and size the planner will look for it.
  std::pair<std::string, KernelSample> kernel_of(const TraceEvent& event) const {
    if (event.op_type == kFeedKernel) {
      return {kFeedKernel, stream_size(static_cast<double>(event.bytes))};
    }
    const Graph& graph = compiled_.programs[0]->variants[0].graph;
    const auto found = std::find_if(graph.nodes().begin(),
                                    graph.nodes().end(),
                                    [&](const Node& node) { return node.name == event.name; });
    TRAINRT_CHECK(found != graph.nodes().end(), event.name);
    const OpContext op(graph, *found);
    return {kernel_name(*found), kernel_size(op, get_op(found->op_type).cost(op))};
  }

  Communicator* world_;
  std::unique_ptr<Device> device_;
  CompiledRank compiled_;
  std::unique_ptr<Executor> executor_;
  std::vector<std::vector<Tensor>> inputs_;
  int64_t steps_ = 0;
};

// One row for each size: the mean of kernels alike, and of the ranks.
std::vector<KernelSample> merged(const std::vector<KernelSample>& rows, Communicator* world) {
  std::map<std::tuple<double, double, double, double, double>, std::vector<double>> alike;
  for (const KernelSample& row : rows) {
    if (row.bytes > 0) {
      alike[{row.batch, row.m, row.n, row.k, row.bytes}].push_back(row.seconds);
    }
  }
  std::vector<KernelSample> result;
  for (const auto& [size, values] : alike) {
    double mean = 0;
    for (const double value : values) {
      mean += value / static_cast<double>(values.size());
    }
    if (world != nullptr) {
      world->all_reduce(&mean, 1, DType::kFloat64, ReductionKind::kSum);
      mean /= world->world_size();
    }
    const auto& [batch, m, n, k, bytes] = size;
    result.push_back({batch, m, n, k, bytes, std::max(1e-9, mean)});
  }
  return result;
}

}  // namespace

KernelTimes time_kernels(const DeviceOptions& device, Communicator* world, double seconds) {
  std::map<std::string, std::vector<KernelSample>> rows;
  std::vector<double> gaps;
  std::vector<SampleModel> models = sample_models();
  if (seconds < kSecondsForAllModels) {
    std::erase_if(models, [i = 0](const SampleModel&) mutable { return i++ % 3 != 0; });
  }
  const int passes = seconds < kSecondsForTwoPasses ? 1 : 2;
  const double part = seconds / passes / static_cast<double>(models.size());
  std::vector<std::vector<std::pair<std::string, KernelSample>>> best(models.size());
  for (int pass = 0; pass < passes; ++pass) {
    for (size_t m = 0; m < models.size(); ++m) {
      const auto found = SampleRun(models[m], device, world).run(part, gaps);
      if (pass == 0) {
        best[m] = found;
      }
      for (size_t i = 0; i < found.size(); ++i) {
        best[m][i].second.seconds = std::min(best[m][i].second.seconds, found[i].second.seconds);
      }
    }
  }
  for (const auto& of_model : best) {
    for (const auto& [name, size] : of_model) {
      rows[name].push_back(size);
    }
  }
  KernelTimes times;
  for (const auto& [name, all] : rows) {
    if (std::vector<KernelSample> samples = merged(all, world); !samples.empty()) {
      times.samples[name] = std::move(samples);
    }
  }
  times.gap_seconds = std::max(1e-9, median(std::move(gaps)));
  if (world != nullptr) {
    world->all_reduce(&times.gap_seconds, 1, DType::kFloat64, ReductionKind::kSum);
    times.gap_seconds /= world->world_size();
  }
  return times;
}

}  // namespace trainrt
