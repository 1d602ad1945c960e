// Enumerate (tensor, sequence parallel, micro-batch) -> one graph and profile each; then (data,
// pipeline, recompute, schedule, virtual stages, ZeRO, device order). A candidate whose closed-form
// memory exceeds a device is dropped; the others get a lower bound (planner/simulator), and are
// replayed in ascending order of it until the bound passes the best replay: the rest cannot win.
// The least bound of all candidates that fit is the search's lower bound.
#include "planner/planner.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <sstream>

#include "graph/base/error.h"
#include "parallel/micro_batches.h"
#include "planner/candidates.h"
#include "planner/shares.h"
#include "planner/stage_partition.h"

namespace trainrt {

namespace {

constexpr size_t kMostAlternatives = 8;

class Search {
 public:
  explicit Search(const PlanRequest& request)
      : request_(request), uniform_(request.topology.is_uniform()) {}

  PlanResult run() {
    check_pins(request_);
    add_graph(request_.pins.micro_batch.value_or(1));
    const int num_blocks = static_cast<int>(graphs_.begin()->second->blocks.blocks.size());
    const std::vector<Degrees> degrees = candidate_degrees(request_, num_blocks);
    TRAINRT_REQUIRE(!degrees.empty(),
                    kInvalidArgument,
                    "no data, tensor and pipeline degrees agree with the pins: ",
                    request_.topology.num_devices(),
                    " devices, batch ",
                    request_.global_batch,
                    ", and a model of ",
                    num_blocks,
                    " blocks that pipeline stages can be cut at");
    for (const Degrees& d : degrees) {
      add_degrees(d);
    }
    decide();
    return std::move(result_);
  }

 private:
  struct GraphAt {
    TrainingGraph graph;
    BlockList blocks;
  };

  const GraphAt& add_graph(int64_t micro_batch) {
    std::unique_ptr<GraphAt>& at = graphs_[micro_batch];
    if (at == nullptr) {
      at = std::make_unique<GraphAt>();
      at->graph = request_.graph(micro_batch);
      at->blocks = find_blocks(at->graph.graph);
    }
    return *at;
  }

  double float_bytes() const {
    return request_.precision == "bf16" || request_.precision == "fp16" ? 2
           : request_.precision == "fp64"                               ? 8
                                                                        : 4;
  }

  // The profile of (micro-batch, tensor degree, sequence parallel); -1 when the degree splits
  // nothing.
  int profile_of(int64_t micro_batch, const Degrees& d, bool sequence_parallel) {
    const auto key = std::make_tuple(micro_batch, d.tensor, sequence_parallel);
    const auto found = profile_index_.find(key);
    if (found != profile_index_.end()) {
      return found->second;
    }
    const GraphAt& at = add_graph(micro_batch);
    const CostModel cost(request_.topology.type_of(0), request_.precision);
    std::vector<int> group;
    for (int i = 0; i < d.tensor; ++i) {
      group.push_back(i);
    }
    const GroupLinks links = group_links(request_.topology, group, 1);
    GraphProfileRequest wanted;
    wanted.graph = &at.graph;
    wanted.blocks = &at.blocks;
    wanted.cost = &cost;
    wanted.tensor_group = &links;
    wanted.micro_batch = micro_batch;
    wanted.tensor_parallel = d.tensor;
    wanted.sequence_parallel = sequence_parallel;
    wanted.float_bytes = request_.precision == "fp64" ? 4 : float_bytes();
    profiles_.push_back(std::make_unique<GraphProfile>(graph_profile(wanted)));
    GraphProfile& made = *profiles_.back();
    if (request_.tokens_per_sample > 0) {
      made.profile.tokens_per_sample = request_.tokens_per_sample;
    }
    engine_ = own_engine(request_.precision, made.optimizer_bytes);
    const bool splits = d.tensor == 1 || !made.placements.empty();
    const int index = splits ? static_cast<int>(profiles_.size()) - 1 : -1;
    profile_index_[key] = index;
    return index;
  }

  void add_degrees(const Degrees& d) {
    const int64_t samples = (request_.global_batch + d.data - 1) / d.data;
    for (const bool sp : {false, true}) {
      if ((sp && d.tensor == 1) || (request_.pins.sequence_parallel.has_value() &&
                                    *request_.pins.sequence_parallel != sp && d.tensor > 1)) {
        continue;
      }
      for (const int64_t b : candidate_micro_batches(request_, samples)) {
        const int profile = profile_of(b, d, sp);
        if (profile < 0 || !add_shapes(d, sp, b, profile)) {
          break;  // larger micro-batches need more memory still
        }
      }
    }
  }

  // True when any candidate of this micro-batch size fits.
  bool add_shapes(const Degrees& d, bool sp, int64_t b, int profile) {
    bool any = false;
    const int blocks = profiles_[static_cast<size_t>(profile)]->profile.num_blocks();
    for (const std::vector<int>& devices : candidate_device_orders(request_.topology, d)) {
      for (const RecomputeMode recompute :
           {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
        if (request_.pins.recompute.value_or(recompute) != recompute) {
          continue;
        }
        bool fits_without_more = false;
        for (const int v : virtual_stages(d, blocks)) {
          for (const ScheduleKind kind : schedules(d, v)) {
            for (int zero = 0; zero <= 3; ++zero) {
              if (!zero_allowed(d, zero)) {
                continue;
              }
              Candidate candidate;
              candidate.profile = profile;
              Layout& layout = candidate.layout;
              layout.data = d.data;
              layout.tensor = d.tensor;
              layout.pipeline = d.pipeline;
              layout.virtual_stages = v;
              layout.schedule = kind;
              layout.zero_stage = zero;
              layout.recompute = recompute;
              layout.sequence_parallel = sp;
              layout.offload_optimizer = request_.pins.offload_optimizer;
              layout.micro_batch = b;
              layout.devices = devices;
              if (!consider(std::move(candidate))) {
                continue;
              }
              any = true;
              // Stages 2 and 3 move as much as 1, or more: they are for what does not fit.
              fits_without_more = fits_without_more || zero <= 1;
              if (zero >= 1) {
                break;
              }
            }
          }
        }
        if (fits_without_more && recompute == RecomputeMode::kNone) {
          break;  // recompute only costs time
        }
      }
    }
    return any;
  }

  std::vector<int> virtual_stages(const Degrees& d, int blocks) const {
    if (request_.pins.virtual_stages.has_value()) {
      return {*request_.pins.virtual_stages};
    }
    std::vector<int> found = {1};
    const bool may =
        request_.pins.schedule.value_or(ScheduleKind::kInterleaved) == ScheduleKind::kInterleaved;
    for (int v = 2; may && d.pipeline > 1 && v <= 6; ++v) {
      if (d.pipeline * v <= blocks - 2) {
        found.push_back(v);
      }
    }
    return found;
  }

  std::vector<ScheduleKind> schedules(const Degrees& d, int v) const {
    if (v > 1) {
      return {ScheduleKind::kInterleaved};
    }
    if (request_.pins.schedule.has_value()) {
      return {*request_.pins.schedule};
    }
    if (d.pipeline == 1) {
      return {ScheduleKind::k1F1B};
    }
    return {ScheduleKind::k1F1B, ScheduleKind::kZeroBubbleH1};
  }

  bool zero_allowed(const Degrees& d, int zero) const {
    if (request_.pins.zero_stage.has_value()) {
      return *request_.pins.zero_stage == zero;
    }
    return zero == 0 || (d.data > 1 && (zero < 3 || d.pipeline == 1));
  }

  StepRequest step_request(const Candidate& candidate, bool bound_only) {
    StepRequest step;
    step.profile = &profiles_[static_cast<size_t>(candidate.profile)]->profile;
    step.topology = &request_.topology;
    step.engine = &engine_;
    step.precision = request_.precision;
    step.layout = &candidate.layout;
    step.bound_only = bound_only;
    step.uniform = uniform_ && candidate.layout.devices.empty();
    step.cache = &cache_;
    return step;
  }

  // Cuts, shares and memory of a candidate. False when it does not fit.
  bool consider(Candidate candidate) {
    ++result_.candidates;
    Layout& layout = candidate.layout;
    const int64_t micro = layout.micro_batch;
    const int total = static_cast<int>((request_.global_batch + micro - 1) / micro);
    if (total < layout.data) {
      return false;
    }
    layout.num_micro_batches = {(total + layout.data - 1) / layout.data};
    if (layout.schedule == ScheduleKind::k2BW && total / layout.data < layout.pipeline) {
      return false;
    }
    cut_stages(&candidate);
    share_batch(total, &candidate);
    candidate.prediction.stages = predict_memory(step_request(candidate, false));
    if (!candidate.prediction.fits()) {
      keep_nearest(candidate);
      ++result_.pruned;
      return false;
    }
    candidate.prediction.lower_bound = predict_step(step_request(candidate, true)).lower_bound;
    fitting_.push_back(std::move(candidate));
    return true;
  }

  int type_at(const Layout& layout, int stage, int data_rank) const {
    const int rank = (stage * layout.data + data_rank) * layout.tensor;
    return request_.topology.device(layout.device(rank)).type;
  }

  void cut_stages(Candidate* candidate) {
    Layout& layout = candidate->layout;
    const int stages = layout.pipeline * layout.virtual_stages;
    layout.first_block.assign(static_cast<size_t>(stages), 0);
    std::map<int, std::vector<double>> by_type;
    std::vector<std::vector<double>> seconds;
    for (int s = 0; s < stages; ++s) {
      // The slowest type among the stage's data ranks sets its pace.
      int slowest = -1;
      double most = -1;
      const int ranks = uniform_ ? 1 : layout.data;
      for (int d = 0; d < ranks; ++d) {
        const int type = type_at(layout, s % layout.pipeline, d);
        if (by_type.count(type) == 0) {
          by_type[type] = block_seconds(step_request(*candidate, false), type);
        }
        double sum = 0;
        for (const double own : by_type[type]) {
          sum += own;
        }
        if (sum > most) {
          most = sum;
          slowest = type;
        }
      }
      seconds.push_back(by_type[slowest]);
    }
    layout.first_block = balanced_cuts(seconds);
  }

  // Micro-batches by data rank: even where ranks are alike, else by speed.
  void share_batch(int total, Candidate* candidate) {
    Layout& layout = candidate->layout;
    const int64_t micro = layout.micro_batch;
    std::vector<int> counts;
    if (!request_.pins.shares.empty()) {
      candidate->shares =
          make_shares(request_.global_batch, layout.data, micro, request_.pins.shares);
    } else if (uniform_) {
      candidate->shares = make_shares(request_.global_batch, layout.data, micro, {});
    } else {
      std::map<int, double> by_type;
      std::vector<double> seconds;
      for (int d = 0; d < layout.data; ++d) {
        double slowest = 0;
        for (int stage = 0; stage < layout.pipeline; ++stage) {
          const int type = type_at(layout, stage, d);
          if (by_type.count(type) == 0) {
            double sum = 0;
            for (const double own : block_seconds(step_request(*candidate, false), type)) {
              sum += own;
            }
            by_type[type] = sum;
          }
          slowest = std::max(slowest, by_type[type]);
        }
        seconds.push_back(slowest);
      }
      const std::vector<int> spread = spread_micro_batches(total, seconds, {});
      const std::vector<double> weights(spread.begin(), spread.end());
      candidate->shares = make_shares(request_.global_batch, layout.data, micro, weights);
    }
    bool alike = true;
    for (const DataShare& share : candidate->shares) {
      counts.push_back(static_cast<int>(share.num_micro_batches));
      alike = alike && counts.back() == counts[0];
    }
    layout.num_micro_batches = alike ? std::vector<int>{counts[0]} : counts;
    // Only the slowest rank matters for time: drop equal counts of a uniform cluster.
    if (uniform_ && !alike) {
      layout.num_micro_batches = {*std::max_element(counts.begin(), counts.end())};
    }
    const int64_t rest = request_.global_batch % micro;
    layout.last_micro_batch = total == layout.data && rest != 0 && layout.data == 1
                                  ? static_cast<double>(rest) / static_cast<double>(micro)
                                  : 1;
  }

  // The candidate that is least short of memory explains an infeasible request.
  void keep_nearest(const Candidate& candidate) {
    int64_t missing = 0;
    int rank = 0;
    for (const StageMemory& stage : candidate.prediction.stages) {
      const int64_t own = stage.peak_bytes + stage.reserved_bytes - stage.capacity_bytes;
      if (own > missing) {
        missing = own;
        rank = stage.stage * candidate.layout.data * candidate.layout.tensor;
      }
    }
    if (result_.missing_bytes == 0 || missing < result_.missing_bytes) {
      result_.missing_bytes = missing;
      result_.missing_rank = rank;
      nearest_ = candidate;
    }
    Candidate& rejected = too_large_[{candidate.layout.tensor, candidate.layout.pipeline}];
    if (rejected.rejected_because.empty() || missing < shortest_[&rejected]) {
      rejected = candidate;
      rejected.rejected_because = concat("does not fit: ", missing, " bytes short on rank ", rank);
      shortest_[&rejected] = missing;
    }
  }

  double value_of(const Candidate& candidate) const {
    const double seconds = candidate.prediction.seconds;
    switch (request_.objective) {
      case Objective::kThroughput:
        return seconds;
      case Objective::kMemory:
        return static_cast<double>(candidate.prediction.peak_bytes());
      case Objective::kDevices:
        return candidate.layout.world_size() + 1e-9 * seconds;
      case Objective::kCost: {
        double hourly = 0;
        for (int rank = 0; rank < candidate.layout.world_size(); ++rank) {
          const auto found =
              request_.price.find(request_.topology.type_of(candidate.layout.device(rank)).name);
          hourly += found == request_.price.end() ? 1 : found->second;
        }
        return hourly * seconds / 3600;
      }
    }
    return seconds;
  }

  void decide() {
    std::stable_sort(fitting_.begin(), fitting_.end(), [](const Candidate& a, const Candidate& b) {
      return a.prediction.lower_bound < b.prediction.lower_bound;
    });
    result_.engine = engine_;
    if (fitting_.empty()) {
      result_.chosen = nearest_;
      result_.chosen.prediction = predict_step(step_request(result_.chosen, false));
      finish(nullptr);
      return;
    }
    result_.feasible = true;
    result_.lower_bound = fitting_[0].prediction.lower_bound;
    std::vector<Candidate> replayed;
    double best = 1e300, best_seconds = 1e300;
    const bool by_time = request_.objective == Objective::kThroughput;
    size_t chosen = 0;
    for (Candidate& candidate : fitting_) {
      if (by_time && candidate.prediction.lower_bound >= best_seconds) {
        result_.pruned += &fitting_.back() - &candidate + 1;
        break;
      }
      candidate.prediction = predict_step(step_request(candidate, false));
      replayed.push_back(candidate);
      const double value = value_of(candidate);
      if (value < best) {
        best = value;
        best_seconds = candidate.prediction.seconds;
        chosen = replayed.size() - 1;
      }
    }
    result_.chosen = replayed[chosen];
    StepRequest again = step_request(result_.chosen, false);
    again.keep_timeline = true;
    result_.chosen.prediction = predict_step(again);
    finish(&replayed);
  }

  // One alternative per (tensor, pipeline), the best of each, with why it lost.
  void finish(std::vector<Candidate>* replayed) {
    const auto shape = [](const Layout& l) { return std::make_pair(l.tensor, l.pipeline); };
    std::set<std::pair<int, int>> seen = {shape(result_.chosen.layout)};
    std::vector<Candidate> others;
    std::vector<Candidate> rest = fitting_;
    if (replayed != nullptr) {
      std::stable_sort(replayed->begin(), replayed->end(), [](const auto& a, const auto& b) {
        return a.prediction.seconds < b.prediction.seconds;
      });
      others = *replayed;
    }
    others.insert(others.end(), rest.begin(), rest.end());
    for (Candidate& other : others) {
      if (result_.alternatives.size() >= kMostAlternatives ||
          !seen.insert(shape(other.layout)).second) {
        continue;
      }
      if (other.prediction.seconds == 0) {
        other.prediction = predict_step(step_request(other, false));
      }
      other.rejected_because = why_slower(other);
      result_.alternatives.push_back(other);
    }
    for (auto& [key, other] : too_large_) {
      if (result_.alternatives.size() < 2 * kMostAlternatives && seen.insert(key).second) {
        other.prediction = predict_step(step_request(other, false));
        result_.alternatives.push_back(other);
      }
    }
    write_plan();
    for (std::unique_ptr<GraphProfile>& profile : profiles_) {
      result_.profiles.push_back(std::move(*profile));
    }
  }

  std::string why_slower(const Candidate& other) const {
    const StepPrediction& best = result_.chosen.prediction;
    const StepBreakdown &a = best.breakdown, &b = other.prediction.breakdown;
    const std::pair<const char*, double> parts[] = {
        {"compute", b.compute - a.compute},
        {"tensor-parallel communication", b.tensor_communication - a.tensor_communication},
        {"stage transfers", b.transfer - a.transfer},
        {"pipeline bubble", b.bubble - a.bubble},
        {"exposed gradient reduction", b.gradients - a.gradients},
        {"weight gathers", b.gather - a.gather},
        {"optimizer", b.optimizer - a.optimizer}};
    const auto worst =
        std::max_element(std::begin(parts), std::end(parts), [](const auto& x, const auto& y) {
          return x.second < y.second;
        });
    const double slower = other.prediction.seconds / best.seconds - 1;
    if (slower <= 0) {
      return "no better by the objective asked for";
    }
    std::ostringstream text;
    text.precision(3);
    text << "slower by " << 100 * slower << " %: " << worst->first << " takes "
         << 1e3 * worst->second << " ms more";
    return text.str();
  }

  void write_plan() {
    const Candidate& c = result_.chosen;
    const Layout& layout = c.layout;
    const GraphProfile& profile = *profiles_[static_cast<size_t>(c.profile)];
    Plan& plan = result_.plan;
    plan.model_hash = request_.model_hash;
    plan.bind = request_.bind;
    plan.precision = request_.precision;
    plan.global_batch = request_.global_batch;
    plan.micro_batch_size = layout.micro_batch;
    plan.data_parallel = layout.data;
    plan.tensor_parallel = layout.tensor;
    plan.pipeline_parallel = layout.pipeline;
    plan.virtual_stages = layout.virtual_stages;
    plan.schedule = layout.schedule;
    plan.zero_stage = layout.zero_stage;
    plan.sequence_parallel = layout.sequence_parallel;
    plan.offload_optimizer = layout.offload_optimizer;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const int device = layout.device(rank);
      plan.devices.push_back(
          {rank, request_.topology.host_of(device).name, request_.topology.device(device).name});
    }
    plan.shares = c.shares;
    const int stages = static_cast<int>(layout.first_block.size());
    int first = 0;
    for (int s = 0; s < stages; ++s) {
      const int end = s + 1 < stages ? layout.first_block[static_cast<size_t>(s) + 1]
                                     : profile.profile.num_blocks();
      PlanStage stage;
      stage.virtual_stage = s;
      stage.rank_stage = s % layout.pipeline;
      stage.first_node = first;
      stage.last_node = profile.last_source[static_cast<size_t>(end) - 1];
      stage.recompute = layout.recompute;
      first = stage.last_node + 1;
      plan.stages.push_back(stage);
    }
    for (const auto& [name, placement] : profile.placements) {
      plan.placements[name] = {Placement::replicate(), placement};
    }
  }

  const PlanRequest& request_;
  bool uniform_;
  Engine engine_;
  PriceCache cache_;
  std::map<int64_t, std::unique_ptr<GraphAt>> graphs_;
  std::map<std::tuple<int64_t, int, bool>, int> profile_index_;
  std::vector<std::unique_ptr<GraphProfile>> profiles_;
  std::vector<Candidate> fitting_;
  Candidate nearest_;
  std::map<std::pair<int, int>, Candidate> too_large_;
  std::map<const Candidate*, int64_t> shortest_;
  PlanResult result_;
};

// Which single change would make the request fit: tried in turn.
void find_remedies(const PlanRequest& request, PlanResult* result) {
  const auto fits = [&](const PlanRequest& changed) {
    try {
      return Search(changed).run().feasible;
    } catch (const Error&) {
      return false;
    }
  };
  PlanRequest changed = request;
  if (request.global_batch > 1) {
    changed.global_batch = std::max<int64_t>(1, request.global_batch / 2);
    changed.pins.shares.clear();
    if (fits(changed)) {
      result->remedies.push_back(concat("--batch-size ", changed.global_batch));
    }
  }
  changed = request;
  if (request.pins.micro_batch.value_or(1) > 1) {
    changed.pins.micro_batch = 1;
    if (fits(changed)) {
      result->remedies.push_back("--micro-batch-size 1");
    }
  }
  changed = request;
  if (request.pins.recompute.has_value() && *request.pins.recompute != RecomputeMode::kFull) {
    changed.pins.recompute = RecomputeMode::kFull;
    if (fits(changed)) {
      result->remedies.push_back("--recompute full");
    }
  }
  changed = request;
  if (request.pins.zero_stage.value_or(3) < 3) {
    changed.pins.zero_stage = 3;
    if (fits(changed)) {
      result->remedies.push_back("--zero 3");
    }
  }
  changed = request;
  if (!request.pins.offload_optimizer) {
    changed.pins.offload_optimizer = true;
    if (fits(changed)) {
      result->remedies.push_back("--offload optimizer");
    }
  }
  // More hosts of the last kind.
  changed = request;
  changed.pins.data.reset();
  changed.pins.tensor.reset();
  changed.pins.pipeline.reset();
  for (int factor = 2; factor <= 16; factor *= 2) {
    Topology larger = request.topology;
    const size_t hosts = request.topology.hosts.size();
    for (size_t i = hosts; i < hosts * static_cast<size_t>(factor); ++i) {
      const Host& host = request.topology.hosts[i % hosts];
      std::vector<int> types;
      for (const int device : host.devices) {
        types.push_back(request.topology.device(device).type);
      }
      larger.add_host(types, host.intra, host.inter, host.num_nics);
    }
    changed.topology = larger;
    if (fits(changed)) {
      result->remedies.push_back(
          concat(larger.num_devices(), " devices instead of ", request.topology.num_devices()));
      break;
    }
  }
}

}  // namespace

Engine own_engine(const std::string& precision, double optimizer_bytes_fp32) {
  Engine engine = find_engine("trainrt");
  const bool half = precision == "bf16" || precision == "fp16";
  const double width = precision == "fp64" ? 2 : 1;
  engine.weight_bytes = half ? 2 : 4 * width;
  engine.gradient_bytes = 4 * width;
  engine.reduce_bytes = 4 * width;
  engine.optimizer_bytes = optimizer_bytes_fp32 + (half ? 4 : 0);  // fp32 master weights
  return engine;
}

PlanResult make_plan(const PlanRequest& request) {
  PlanResult result = Search(request).run();
  if (!result.feasible) {
    find_remedies(request, &result);
  }
  return result;
}

}  // namespace trainrt
