// A step = pipeline (replayed per distinct data rank: devices and micro-batch count) + exposed
// gradient reduction + update + exposed gathers. Collectives that run beside compute slow it: of
// two times a (compute) and c (collective) side by side, max(a, c) + (slowdown - 1) * min(a, c)
// passes.
#include "planner/step_cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "graph/base/error.h"
#include "parallel/passes/buckets.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

double side_by_side(double compute, double communication, double slowdown) {
  return std::max(compute, communication) + (slowdown - 1) * std::min(compute, communication);
}

}  // namespace

bool StepPrediction::fits() const {
  return std::all_of(stages.begin(), stages.end(), [](const StageMemory& s) { return s.fits(); });
}

int64_t StepPrediction::peak_bytes() const {
  int64_t peak = 0;
  for (const StageMemory& stage : stages) {
    peak = std::max(peak, stage.peak_bytes);
  }
  return peak;
}

std::vector<int> even_cuts(int num_blocks, int num_virtual_stages) {
  // Weights: 1 per inner block, 0 for the first and last, which ride along.
  const int inner = std::max(num_blocks - 2, num_virtual_stages);
  std::vector<int> first = {0};
  for (int s = 1; s < num_virtual_stages; ++s) {
    const int layers = static_cast<int>(static_cast<int64_t>(s) * inner / num_virtual_stages);
    first.push_back(std::min(num_blocks - 1, 1 + layers));
  }
  return first;
}

namespace {

class StepPricer {
 public:
  explicit StepPricer(const StepRequest& request)
      : request_(request),
        profile_(*request.profile),
        topology_(*request.topology),
        engine_(*request.engine),
        layout_(*request.layout),
        slowdown_(cost_model(type_index(0)).constants().overlap_slowdown) {}

  std::vector<StageTimes> class_seconds(int device_type) {
    // Of the tensor group that spans the fewest hosts.
    std::pair<int, int> place = {0, 0};
    if (layout_.tensor > 1 && !request_.uniform) {
      int least = find_tensor_links(0, 0).num_hosts;
      for (int stage = 0; stage < layout_.pipeline; ++stage) {
        for (int data_rank = 0; data_rank < layout_.data; ++data_rank) {
          const int own = find_tensor_links(stage, data_rank).num_hosts;
          place = own < least ? std::make_pair(stage, data_rank) : place;
          least = std::min(least, own);
        }
      }
    }
    const PricedProfile& prices = priced(device_type, place.first, place.second);
    std::vector<StageTimes> seconds;
    for (size_t i = 0; i < profile_.classes.size(); ++i) {
      const PricedClass& p = prices.of_class(static_cast<int>(i));
      const double again = recomputed_phase(static_cast<int>(i), p, layout_.recompute).total();
      seconds.push_back({p.forward.total(),
                         p.input_grad.total() + p.weight_grad.total() + again,
                         p.weight_grad.total()});
    }
    return seconds;
  }

  // After the pipeline, were every stage to hold `parameters` and its last backward to take
  // `last_backward`: the least over the stages.
  double least_after(double parameters, double last_backward) {
    last_backward_ = last_backward;
    double least = 1e300;
    for (int stage = 0;
         stage < (request_.uniform && layout_.devices.empty() ? 1 : layout_.pipeline);
         ++stage) {
      const double own = reduce_seconds(stage, parameters) + gather_seconds(stage, parameters) +
                         optimizer_seconds(stage, parameters);
      least = std::min(least, own);
    }
    return least;
  }

  double pipeline_seconds(int data_rank) { return run_pipeline(data_rank, nullptr).seconds; }

  StepPrediction run() {
    check();
    StepPrediction result;
    result.stages = predict_memory(request_);
    std::map<std::vector<int>, bool> seen;  // data ranks alike are replayed once
    double pipeline = 0, bound = 0;
    const bool alike = request_.uniform && layout_.num_micro_batches.size() == 1;
    for (int data_rank = 0; data_rank < (alike ? 1 : layout_.data); ++data_rank) {
      std::vector<int> key = {layout_.micro_batches(data_rank)};
      for (int stage = 0; stage < layout_.pipeline; ++stage) {
        key.push_back(slowest_type(stage, data_rank));
      }
      if (!layout_.micro_batch_scales.empty()) {
        key.push_back(data_rank);
      }
      if (key[0] == 0 || !seen.emplace(key, true).second) {
        continue;
      }
      const Pipeline one =
          run_pipeline(data_rank, result.breakdown.compute == 0 ? &result.breakdown : nullptr);
      pipeline = std::max(pipeline, one.seconds);
      bound = std::max(bound, one.bound);
    }
    result.bound_only = request_.bound_only;
    result.timeline = std::move(timeline_);
    const double after = after_pipeline(&result.breakdown);
    result.seconds = pipeline + after;
    result.lower_bound = bound + after;
    const double idle = result.breakdown.bubble;
    result.bubble_fraction = result.seconds > 0 ? idle / result.seconds : 0;
    return result;
  }

 private:
  struct Pipeline {
    double seconds = 0;
    double bound = 0;
  };

  void check() const {
    TRAINRT_CHECK(
        static_cast<int>(layout_.first_block.size()) == layout_.pipeline * layout_.virtual_stages &&
            layout_.first_block[0] == 0,
        "a layout needs the first block of every virtual stage");
    TRAINRT_CHECK(layout_.world_size() <= topology_.num_devices() || !layout_.devices.empty(),
                  "layout wants ",
                  layout_.world_size(),
                  " devices of ",
                  topology_.num_devices());
  }

  int type_index(int rank) const { return topology_.device(layout_.device(rank)).type; }
  const DeviceType& type(int rank) const { return topology_.type_of(layout_.device(rank)); }

  const CostModel& cost_model(int device_type) {
    auto& models =
        request_.cache != nullptr ? request_.cache->cost_models : own_prices_.cost_models;
    const auto found = models.find(device_type);
    return found != models.end()
               ? found->second
               : models
                     .emplace(device_type,
                              CostModel(topology_.types[static_cast<size_t>(device_type)],
                                        request_.precision))
                     .first->second;
  }

  int rank_of(int stage, int data_rank, int tensor_rank) const {
    return (stage * layout_.data + data_rank) * layout_.tensor + tensor_rank;
  }

  // The tensor group's type with the lowest rate: the others wait for it.
  int slowest_type(int stage, int data_rank) const {
    int slowest = -1;
    double rate = 0;
    for (int i = 0; i < layout_.tensor; ++i) {
      const int index = topology_.device(layout_.device(rank_of(stage, data_rank, i))).type;
      const DeviceType& candidate = topology_.types[static_cast<size_t>(index)];
      const double own = candidate.peak_flops(request_.precision);
      if (slowest < 0 || own < rate) {
        slowest = index;
        rate = own;
      }
    }
    return slowest;
  }

  GroupLinks tensor_links(int stage, int data_rank) {
    if (request_.uniform && layout_.devices.empty()) {
      if (!uniform_links_.has_value()) {
        uniform_links_ = find_tensor_links(0, 0);
      }
      return *uniform_links_;
    }
    return find_tensor_links(stage, data_rank);
  }

  GroupLinks find_tensor_links(int stage, int data_rank) const {
    std::vector<int> group;
    for (int i = 0; i < layout_.tensor; ++i) {
      group.push_back(layout_.device(rank_of(stage, data_rank, i)));
    }
    return group_links(topology_, group, concurrent_groups(group));
  }

  GroupLinks data_links(int stage) const {
    const bool plain = request_.uniform && layout_.devices.empty();
    stage = plain ? 0 : stage;
    const std::array<int, 5> key = {
        layout_.data, layout_.tensor, layout_.pipeline, layout_.device_order, stage};
    const bool cached = request_.cache != nullptr && layout_.device_order >= 0;
    if (cached) {
      const auto found = request_.cache->data_links.find(key);
      if (found != request_.cache->data_links.end()) {
        return found->second;
      }
    }
    std::vector<int> group;
    for (int d = 0; d < layout_.data; ++d) {
      group.push_back(layout_.device(rank_of(stage, d, 0)));
    }
    const GroupLinks links = group_links(topology_, group, concurrent_groups(group));
    if (cached) {
      request_.cache->data_links.emplace(key, links);
    }
    return links;
  }

  // Groups of one kind that share the first device's host.
  int concurrent_groups(const std::vector<int>& group) const {
    const int host = topology_.device(group[0]).host;
    int here = 0;
    for (const int device : group) {
      here += topology_.device(device).host == host ? 1 : 0;
    }
    const int on_host = static_cast<int>(topology_.hosts[static_cast<size_t>(host)].devices.size());
    return std::max(1, std::min(on_host, layout_.world_size()) / std::max(1, here));
  }

  const PricedProfile& priced(int type_index, int stage, int data_rank) {
    const GroupLinks links = tensor_links(stage, data_rank);
    auto& prices = request_.cache != nullptr ? request_.cache->profiles : own_prices_.profiles;
    const auto key = std::make_tuple(&profile_, type_index, links.num_hosts);
    const auto found = prices.find(key);
    if (found != prices.end()) {
      return found->second;
    }
    return prices.emplace(key, PricedProfile(profile_, cost_model(type_index), links, engine_))
        .first->second;
  }

  int last_block(size_t virtual_stage) const {
    return virtual_stage + 1 < layout_.first_block.size() ? layout_.first_block[virtual_stage + 1]
                                                          : profile_.num_blocks();
  }

  // A stage's parameters on one tensor rank, and the elements of the largest block.
  double stage_parameters(int stage) const {
    double sum = 0;
    for (size_t s = static_cast<size_t>(stage); s < layout_.first_block.size();
         s += static_cast<size_t>(layout_.pipeline)) {
      for (int b = layout_.first_block[s]; b < last_block(s); ++b) {
        sum += profile_.block(b).parameters;
        // A copy of a parameter that the stage holds anyway is no parameter of its own.
        sum -= layout_.pipeline == 1 ? profile_.block(b).shared_parameters : 0;
      }
    }
    return sum;
  }

  struct VirtualStage {
    StageTimes times;
    double communication = 0;  // of forward and backward together
    double gather_exposed = 0;
  };

  // ZeRO-3 gathers a block's weights beside the block before it, and reduces its gradients beside
  // the backward of the block after; ZeRO-2 may do the latter alone.
  void add_sharded(const BlockClass& block,
                   double forward,
                   double backward,
                   const GroupLinks& group,
                   const std::string& architecture,
                   VirtualStage* stage) const {
    const int parts = engine_.gathers_per_block;
    const auto in_parts = [&](Collective kind, double bytes) {
      return parts * collective_time(kind, bytes / parts, group, architecture).seconds;
    };
    const double gather =
        layout_.zero_stage < 3
            ? 0
            : in_parts(Collective::kAllGather, engine_.gather_bytes * block.parameters) +
                  parts * layout_.data * engine_.gather_call_seconds;
    const double again =
        engine_.regathers && layout_.recompute != RecomputeMode::kNone ? gather : 0;
    const double reduce =
        again + in_parts(Collective::kReduceScatter, engine_.reduce_bytes * block.parameters);
    double f = forward + gather, b = backward + gather + reduce;
    if (engine_.overlap_gather) {
      f = side_by_side(forward, gather, slowdown_);
      b = side_by_side(backward, gather + reduce, slowdown_);
    }
    stage->gather_exposed += f - forward + b - backward;
    stage->times.forward += f;
    stage->times.backward += b;
  }

  VirtualStage price_stage(size_t s, int data_rank) {
    const int stage = static_cast<int>(s) % layout_.pipeline;
    const int type_index = slowest_type(stage, data_rank);
    const PricedProfile& prices = priced(type_index, stage, data_rank);
    VirtualStage result;
    const bool sharded = layout_.data > 1 && (layout_.zero_stage == 3 || scatters_each());
    const GroupLinks group = sharded ? data_links(stage) : GroupLinks{};
    for (int b = layout_.first_block[s]; b < last_block(s); ++b) {
      const int index = profile_.blocks[static_cast<size_t>(b)];
      const PricedClass& p = prices.of_class(index);
      const PricedPhase again = recomputed_phase(index, p, layout_.recompute_of(s));
      const double forward = p.forward.total();
      const double backward = p.input_grad.total() + p.weight_grad.total() + again.total();
      result.communication += p.forward.communication + p.input_grad.communication +
                              p.weight_grad.communication + again.communication;
      result.times.weight_grad += p.weight_grad.total();
      if (sharded) {
        add_sharded(profile_.classes[static_cast<size_t>(index)],
                    forward,
                    backward,
                    group,
                    topology_.types[static_cast<size_t>(type_index)].architecture,
                    &result);
      } else {
        result.times.forward += forward;
        result.times.backward += backward;
      }
    }
    return result;
  }

  bool scatters_each() const { return layout_.zero_stage == 2 && engine_.scatters_each; }

  // What runs again before a block's backward.
  PricedPhase recomputed_phase(int block_class, const PricedClass& p, RecomputeMode mode) const {
    if (!profile_.classes[static_cast<size_t>(block_class)].recomputed) {
      return {};
    }
    switch (mode) {
      case RecomputeMode::kFull:
        return p.forward;
      case RecomputeMode::kSelective:
        return p.selective;
      default:
        return {};
    }
  }

  double transfer_seconds(size_t s, int data_rank) {
    const int from = static_cast<int>(s) % layout_.pipeline;
    const int to = static_cast<int>(s + 1) % layout_.pipeline;
    const int sender = layout_.device(rank_of(from, data_rank, 0));
    const int receiver = layout_.device(rank_of(to, data_rank, 0));
    if (sender == receiver) {
      return 0;
    }
    const double whole = profile_.block(last_block(s) - 1).output_bytes;
    const int on_host = static_cast<int>(topology_.host_of(sender).devices.size());
    const GroupLinks pair = group_links(topology_, {sender, receiver}, on_host);
    double bytes = whole;
    double gather = 0;
    if (profile_.scattered_transfers) {
      bytes /= layout_.tensor;
      if (!profile_.sequence_parallel) {
        gather = collective_time(Collective::kAllGather,
                                 whole,
                                 tensor_links(to, data_rank),
                                 topology_.type_of(receiver).architecture)
                     .seconds;
      }
    }
    return send_time(bytes, pair) + gather;
  }

  Pipeline run_pipeline(int data_rank, StepBreakdown* breakdown) {
    const int m = layout_.micro_batches(data_rank);
    ReplayInput input;
    double communication = 0, gather = 0, compute = 0;
    for (size_t s = 0; s < layout_.first_block.size(); ++s) {
      const VirtualStage stage = price_stage(s, data_rank);
      input.stages.push_back(stage.times);
      communication += stage.communication;
      gather += stage.gather_exposed;
      compute += stage.times.forward + stage.times.backward;
      if (s + 1 < layout_.first_block.size()) {
        input.transfer.push_back(transfer_seconds(s, data_rank));
      }
    }
    input.blocking_transfers = engine_.blocking_transfers;
    if (layout_.last_micro_batch < 1) {
      input.micro_batch_scale.assign(static_cast<size_t>(m), 1);
      input.micro_batch_scale.back() = layout_.last_micro_batch;
    }
    if (!layout_.micro_batch_scales.empty()) {
      input.micro_batch_scale = layout_.micro_batch_scales[static_cast<size_t>(data_rank)];
    }
    last_backward_ = std::max(last_backward_, last_backward_seconds(input));
    Pipeline result;
    const bool single = layout_.virtual_stages == 1 && layout_.schedule == ScheduleKind::k1F1B;
    if (single) {
      result.bound = lower_bound_1f1b(input, m);
    }
    if (request_.bound_only && single) {
      result.seconds = result.bound;
      return result;
    }
    const Schedule& schedule = schedule_of(m);
    if (!single) {
      result.bound = lower_bound_any(schedule, input);
    }
    if (request_.bound_only) {
      result.seconds = result.bound;
      return result;
    }
    const Replay replay = replay_schedule(schedule, input);
    if (request_.keep_timeline && timeline_ == nullptr) {
      timeline_ = std::make_shared<const Timeline>(Timeline{schedule, replay});
    }
    result.seconds = replay.seconds;
    if (breakdown != nullptr) {
      const double p = layout_.pipeline;
      double busy = 0, transfer = 0;
      for (size_t i = 0; i < replay.rank_compute.size(); ++i) {
        busy += replay.rank_compute[i] / p;
        transfer += replay.rank_transfer[i] / p;
      }
      const double share = compute > 0 ? busy / compute : 0;
      breakdown->tensor_communication = communication * share;
      breakdown->gather = gather * share;
      breakdown->compute = busy - breakdown->tensor_communication - breakdown->gather;
      breakdown->transfer = transfer;
      breakdown->bubble = replay.seconds - busy - transfer;
    }
    return result;
  }

  const Schedule& schedule_of(int m) {
    auto& schedules = request_.cache != nullptr ? request_.cache->schedules : own_prices_.schedules;
    const std::array<int, 4> key = {
        static_cast<int>(layout_.schedule), layout_.pipeline, m, layout_.virtual_stages};
    const auto found = schedules.find(key);
    return found != schedules.end()
               ? found->second
               : schedules
                     .emplace(key,
                              make_schedule(
                                  layout_.schedule, layout_.pipeline, m, layout_.virtual_stages))
                     .first->second;
  }

  // What the gradient reduction may hide behind: the last micro-batch's backward of a rank.
  double last_backward_seconds(const ReplayInput& input) const {
    double least = 1e30;
    for (int stage = 0; stage < layout_.pipeline; ++stage) {
      double sum = 0;
      for (size_t s = static_cast<size_t>(stage); s < input.stages.size();
           s += static_cast<size_t>(layout_.pipeline)) {
        sum += input.stages[s].backward;
      }
      least = std::min(least, sum);
    }
    return least * layout_.last_micro_batch;
  }

  // Gradient reduction, tied parameters, update and weight gathers of the slowest stage.
  double after_pipeline(StepBreakdown* breakdown) {
    double worst = 0;
    for (int stage = 0; stage < layout_.pipeline; ++stage) {
      const double parameters = stage_parameters(stage);
      const double gradients = reduce_seconds(stage, parameters) + tied_seconds(stage);
      const double gather = gather_seconds(stage, parameters);
      const double optimizer = optimizer_seconds(stage, parameters);
      if (gradients + gather + optimizer > worst) {
        worst = gradients + gather + optimizer;
        breakdown->gradients = gradients;
        breakdown->optimizer = optimizer;
        after_gather_ = gather;
      }
    }
    breakdown->gather += after_gather_;
    return worst;
  }

  // What a stage's data ranks exchange once per step, in messages as large as the engine's.
  double collect(Collective kind, double bytes, int stage) const {
    const GroupLinks links = data_links(stage);
    double messages = 1;
    if (engine_.buckets) {
      const bool on_cpu = links.intra.kind == LinkKind::kSharedMemory;
      const int64_t most = bucket_bytes(on_cpu ? Backend::kCpu : Backend::kCuda, layout_.data);
      messages = std::max(1.0, std::ceil(bytes / static_cast<double>(most)));
    }
    return messages *
           collective_time(kind, bytes / messages, links, type(rank_of(stage, 0, 0)).architecture)
               .seconds;
  }

  double gather_seconds(int stage, double parameters) const {
    return layout_.zero_stage == 1 || layout_.zero_stage == 2
               ? collect(Collective::kAllGather, engine_.gather_bytes * parameters, stage)
               : 0;
  }

  double reduce_seconds(int stage, double parameters) const {
    double seconds = 0;
    if (layout_.data > 1 && layout_.zero_stage < 3 && !scatters_each()) {
      const Collective kind = layout_.zero_stage == 0 || engine_.name == "deepspeed"
                                  ? Collective::kAllReduce
                                  : Collective::kReduceScatter;
      const double whole = collect(kind, engine_.reduce_bytes * parameters, stage);
      if (engine_.overlap_gradients) {  // the last block's gradients have nothing to hide behind
        const double window = 0.9 * last_backward_;
        seconds = std::max(side_by_side(window, whole, slowdown_) - window, 0.05 * whole);
      } else {
        seconds = whole;
      }
    }
    return seconds;
  }

  // Tied embedding: first and last stage sum their copies.
  double tied_seconds(int stage) const {
    double seconds = 0;
    const double tied = profile_.block(profile_.num_blocks() - 1).shared_parameters;
    if (layout_.pipeline > 1 && tied > 0 && (stage == 0 || stage == layout_.pipeline - 1)) {
      const int a = layout_.device(rank_of(0, 0, 0));
      const int b = layout_.device(rank_of(layout_.pipeline - 1, 0, 0));
      // One such pair for each rank of the first stage, of whom so many share a host's network.
      const int on_host = std::min(static_cast<int>(topology_.host_of(a).devices.size()),
                                   layout_.data * layout_.tensor);
      seconds += collective_time(Collective::kAllReduce,
                                 engine_.reduce_bytes * tied,
                                 group_links(topology_, {a, b}, on_host),
                                 topology_.type_of(a).architecture)
                     .seconds;
    }
    return seconds;
  }

  // Norm and overflow check read the gradients twice, Adam reads them and reads and writes weights
  // and moments, and the buffer is cleared.
  double optimizer_seconds(int stage, double parameters) {
    const double shards = layout_.zero_stage >= 1 ? layout_.data : 1;
    const double bytes =
        parameters / shards *
            (3 * engine_.gradient_bytes + 2 * engine_.optimizer_bytes + engine_.update_bytes) +
        engine_.gradient_bytes * parameters;
    if (layout_.offload_optimizer) {  // gradients to the host, weights back, over PCIe
      constexpr double kHostLink = 20e9;
      return (engine_.gradient_bytes + 2) * parameters / shards / kHostLink + bytes / 40e9;
    }
    return cost_model(type_index(rank_of(stage, 0, 0))).stream_seconds(bytes, 0);
  }

  const StepRequest& request_;
  const ModelProfile& profile_;
  const Topology& topology_;
  const Engine& engine_;
  const Layout& layout_;
  PriceCache own_prices_;
  double slowdown_;
  std::optional<GroupLinks> uniform_links_;  // every tensor group's, where all are alike
  std::shared_ptr<const Timeline> timeline_;
  double last_backward_ = 0;
  double after_gather_ = 0;
};

}  // namespace

std::vector<StageTimes> class_seconds(const StepRequest& request, int device_type) {
  return StepPricer(request).class_seconds(device_type);
}

double least_seconds_after(const StepRequest& request, double parameters, double last_backward) {
  return StepPricer(request).least_after(parameters, last_backward);
}

double pipeline_seconds(const StepRequest& request, int data_rank) {
  return StepPricer(request).pipeline_seconds(data_rank);
}

StepPrediction predict_step(const StepRequest& request) {
  return StepPricer(request).run();
}

}  // namespace trainrt
