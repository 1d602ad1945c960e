// A step = pipeline (replayed per distinct data rank: devices and micro-batch count) + exposed
// gradient reduction + update + exposed gathers. Collectives that run beside compute slow it: of
// two times a (compute) and c (collective) side by side, max(a, c) + (slowdown - 1) * min(a, c)
// passes.
#include "planner/step_cost.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "graph/base/error.h"
#include "parallel/passes/buckets.h"
#include "planner/step_devices.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

double side_by_side(double compute, double communication, double slowdown) {
  return std::max(compute, communication) + (slowdown - 1) * std::min(compute, communication);
}

}  // namespace

RecomputeMode strongest_recompute(const Layout& layout, int stage) {
  if (layout.block_recompute.empty()) {
    return layout.recompute;
  }
  RecomputeMode strongest = RecomputeMode::kNone;
  const std::vector<int>& first = layout.first_block;
  for (auto s = static_cast<size_t>(stage); s < first.size();
       s += static_cast<size_t>(layout.pipeline)) {
    const auto end =
        s + 1 < first.size() ? first[s + 1] : static_cast<int>(layout.block_recompute.size());
    for (int b = first[s]; b < end; ++b) {
      strongest = std::max(strongest, layout.recompute_of(b));
    }
  }
  return strongest;
}

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

namespace {

class StepPricer : private StepDevices {
 public:
  explicit StepPricer(const StepRequest& request)
      : StepDevices(request),
        profile_(*request.profile),
        engine_(*request.engine),
        slowdown_(cost_model(type_index(0)).constants().overlap_slowdown) {}

  std::vector<StageTimes> class_seconds(const ModelProfile& profile,
                                        int device_type,
                                        RecomputeMode mode) {
    // Of the tensor group, of such devices if there is one, that has the best links.
    std::pair<int, int> place = {0, 0};
    if (layout_.tensor > 1 && !request_.uniform) {
      const auto rank = [&](int stage, int data_rank) {
        const GroupLinks& links = tensor_links(stage, data_rank);
        return std::make_tuple(slowest_type(stage, data_rank) != device_type,
                               links.num_hosts,
                               -links.intra.bandwidth,
                               -links.host_bandwidth);
      };
      for (int stage = 0; stage < layout_.pipeline; ++stage) {
        for (int data_rank = 0; data_rank < layout_.data; ++data_rank) {
          place = rank(stage, data_rank) < rank(place.first, place.second)
                      ? std::make_pair(stage, data_rank)
                      : place;
        }
      }
    }
    const PricedProfile& prices = priced(profile, device_type, place.first, place.second);
    std::vector<StageTimes> seconds;
    for (size_t i = 0; i < profile.classes.size(); ++i) {
      seconds.push_back(prices.block(static_cast<int>(i), mode).times);
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

  double pipeline_seconds(int data_rank) { return replay(prepare(data_rank), nullptr); }

  StepPrediction run() {
    check();
    StepPrediction result;
    if (!request_.time_only) {
      result.stages = predict_memory(request_);
    }
    std::vector<Pipeline> pipelines;
    std::vector<int> seen;  // data ranks: those alike are replayed once
    double bound = 0;
    const bool alike = request_.uniform && layout_.num_micro_batches.size() == 1 &&
                       layout_.micro_batch_sizes.empty();
    for (int data_rank = 0; data_rank < (alike ? 1 : layout_.data); ++data_rank) {
      const auto is_alike = [&](int other) { return are_alike(data_rank, other); };
      if (layout_.micro_batches(data_rank) != 0 &&
          std::none_of(seen.begin(), seen.end(), is_alike)) {
        seen.push_back(data_rank);
        pipelines.push_back(prepare(data_rank));
        bound = std::max(bound, pipelines.back().bound);
      }
    }
    const StepBreakdown after = after_pipeline();
    const double after_seconds = after.gradients + after.gather + after.optimizer;
    result.lower_bound = bound + after_seconds;
    result.bound_only = request_.bound_only || result.lower_bound >= request_.give_up;
    if (result.bound_only) {
      result.seconds = result.lower_bound;
      return result;
    }
    double seconds = 0;
    for (const Pipeline& own : pipelines) {
      seconds = std::max(seconds, replay(own, &own == &pipelines[0] ? &result.breakdown : nullptr));
    }
    result.seconds = seconds + after_seconds;
    result.timeline = std::move(timeline_);
    result.breakdown.gradients += after.gradients;
    result.breakdown.gather += after.gather;
    result.breakdown.optimizer = after.optimizer;
    const double idle = result.breakdown.bubble;
    result.bubble_fraction = result.seconds > 0 ? idle / result.seconds : 0;
    return result;
  }

 private:
  bool are_alike(int a, int b) {
    if (layout_.micro_batches(a) != layout_.micro_batches(b) ||
        layout_.micro_batch_size(a) != layout_.micro_batch_size(b) ||
        (!layout_.micro_batch_scales.empty() &&
         layout_.micro_batch_scales[static_cast<size_t>(a)] !=
             layout_.micro_batch_scales[static_cast<size_t>(b)])) {
      return false;
    }
    for (int stage = 0; stage < layout_.pipeline; ++stage) {
      if (slowest_type(stage, a) != slowest_type(stage, b)) {
        return false;
      }
    }
    return true;
  }

  // One data rank's.
  struct Pipeline {
    int num_micro_batches = 0;
    ReplayInput input;
    double communication = 0, statistics = 0, gather = 0;  // of a micro-batch, in the stages' times
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

  const PricedProfile& priced(const ModelProfile& profile,
                              int type_index,
                              int stage,
                              int data_rank) {
    const GroupLinks& links = tensor_links(stage, data_rank);
    auto& prices = request_.cache != nullptr ? request_.cache->profiles : own_prices_.profiles;
    const auto key = std::make_tuple(
        &profile, type_index, links.num_hosts, links.intra.bandwidth, links.host_bandwidth);
    const auto found = prices.find(key);
    if (found != prices.end()) {
      return found->second;
    }
    return prices.emplace(key, PricedProfile(profile, cost_model(type_index), links, engine_))
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
    double communication = 0;  // of forward and backward together, with the tensor group
    double statistics = 0;     // with the data group
    double gather_exposed = 0;
  };

  // ZeRO-3 gathers a block's weights beside the block before it, and reduces its gradients beside
  // the backward of the block after; ZeRO-2 may do the latter alone. `times`: of a block.
  void shard(const BlockClass& block,
             const GroupLinks& group,
             const std::string& architecture,
             RecomputeMode mode,
             StageTimes* times,
             double* exposed) const {
    const int parts = engine_.gathers_per_block;
    const auto in_parts = [&](Collective kind, double bytes) {
      return parts * collective_time(kind, bytes / parts, group, architecture).seconds;
    };
    const double gather =
        layout_.zero_stage < 3
            ? 0
            : in_parts(Collective::kAllGather, engine_.gather_bytes * block.parameters) +
                  parts * layout_.data * engine_.gather_call_seconds;
    const double again = engine_.regathers && mode != RecomputeMode::kNone ? gather : 0;
    const bool scatters = layout_.exact.exchanged == 0;  // else all at once, after the last
    const double reduce = again + (scatters ? in_parts(Collective::kReduceScatter,
                                                       engine_.reduce_bytes * block.parameters)
                                            : 0);
    double f = times->forward + gather, b = times->backward + gather + reduce;
    if (engine_.overlap_gather) {
      f = side_by_side(times->forward, gather, slowdown_);
      b = side_by_side(times->backward, gather + reduce, slowdown_);
    }
    *exposed = f - times->forward + b - times->backward;
    times->forward = f;
    times->backward = b;
  }

  // The sums over data ranks of a block whose BatchNorm is synchronised.
  StageTimes statistics_seconds(const BlockClass& block,
                                const GroupLinks& group,
                                const std::string& architecture,
                                RecomputeMode mode) const {
    const auto sum = [&](const PhaseProfile& phase) {
      double all = 0;
      for (const double bytes : phase.statistics_bytes) {
        all += collective_time(Collective::kAllReduce, bytes, group, architecture).seconds;
      }
      return all;
    };
    return {sum(block.forward),
            sum(block.input_grad) + sum(block.weight_grad) +
                (mode == RecomputeMode::kFull        ? sum(block.forward)
                 : mode == RecomputeMode::kSelective ? sum(block.selective)
                                                     : 0),
            0};
  }

  VirtualStage price_stage(size_t s, int data_rank) {
    const int stage = static_cast<int>(s) % layout_.pipeline;
    const int type_index = slowest_type(stage, data_rank);
    const ModelProfile& profile = request_.profile_of(data_rank);
    const PricedProfile& prices = priced(profile, type_index, stage, data_rank);
    const bool sharded = layout_.data > 1 && (layout_.zero_stage == 3 || scatters_each());
    const bool synced = layout_.data > 1 && layout_.sync_batch_norm;
    VirtualStage result;
    if (!sharded && !synced) {
      for (int b = layout_.first_block[s], end = 0; b < last_block(s); b = end) {
        end = layout_.end_of_recompute(b, last_block(s));
        const PricedRun run = prices.run(b, end, layout_.recompute_of(b));
        result.times.forward += run.times.forward;
        result.times.backward += run.times.backward;
        result.times.weight_grad += run.times.weight_grad;
        result.communication += run.communication;
      }
      return result;
    }
    std::map<std::pair<size_t, RecomputeMode>, int> counts;  // of blocks, by class
    for (int b = layout_.first_block[s]; b < last_block(s); ++b) {
      ++counts[{static_cast<size_t>(profile.blocks[static_cast<size_t>(b)]),
                layout_.recompute_of(b)}];
    }
    const GroupLinks& group = data_links(stage);
    const std::string& architecture = topology_.types[static_cast<size_t>(type_index)].architecture;
    for (const auto& [kind, count] : counts) {
      const auto& [c, mode] = kind;
      const BlockClass& block = profile.classes[c];
      const PricedRun& own = prices.block(static_cast<int>(c), mode);
      StageTimes times = own.times;
      double exposed = 0;
      if (synced) {
        const StageTimes sums = statistics_seconds(block, group, architecture, mode);
        times.forward += sums.forward;
        times.backward += sums.backward;
        result.statistics += count * (sums.forward + sums.backward);
      }
      if (sharded) {
        shard(block, group, architecture, mode, &times, &exposed);
      }
      result.times.forward += count * times.forward;
      result.times.backward += count * times.backward;
      result.times.weight_grad += count * times.weight_grad;
      result.communication += count * own.communication;
      result.gather_exposed += count * exposed;
    }
    return result;
  }

  bool scatters_each() const {
    return layout_.zero_stage == 2 && engine_.scatters_each && layout_.exact.exchanged == 0;
  }

  double transfer_seconds(size_t s, int data_rank) {
    const int from = static_cast<int>(s) % layout_.pipeline;
    const int to = static_cast<int>(s + 1) % layout_.pipeline;
    if (from == to) {
      return 0;
    }
    const ModelProfile& profile = request_.profile_of(data_rank);
    const double whole = profile.block(last_block(s) - 1).output_bytes;
    double bytes = whole;
    double gather = 0;
    if (profile.scattered_transfers) {
      bytes /= layout_.tensor;
      if (!profile.sequence_parallel) {
        gather = collective_time(Collective::kAllGather,
                                 whole,
                                 tensor_links(to, data_rank),
                                 type(rank_of(to, data_rank, 0)).architecture)
                     .seconds;
      }
    }
    return send_time(bytes, transfer_links(from, data_rank)) + gather;
  }

  Pipeline prepare(int data_rank) {
    Pipeline result;
    const int m = layout_.micro_batches(data_rank);
    result.num_micro_batches = m;
    ReplayInput& input = result.input;
    input.stages.reserve(layout_.first_block.size());
    input.transfer.reserve(layout_.first_block.size());
    for (size_t s = 0; s < layout_.first_block.size(); ++s) {
      const VirtualStage stage = price_stage(s, data_rank);
      input.stages.push_back(stage.times);
      result.communication += stage.communication;
      result.statistics += stage.statistics;
      result.gather += stage.gather_exposed;
      if (s + 1 < layout_.first_block.size()) {
        input.transfer.push_back(transfer_seconds(s, data_rank));
      }
    }
    input.blocking_transfers = engine_.blocking_transfers;
    if (layout_.last_micro_batch < 1) {
      input.micro_batch_scale.assign(static_cast<size_t>(m), 1);
      input.micro_batch_scale.back() = layout_.last_micro_batch;
    }
    if (std::vector<double> scales = layout_.scales_of(data_rank); !scales.empty()) {
      input.micro_batch_scale = std::move(scales);
    }
    last_backward_ = std::max(last_backward_, last_backward_seconds(input));
    const bool single = layout_.virtual_stages == 1 && layout_.schedule == ScheduleKind::k1F1B;
    if (runs_on()) {
      result.bound = lower_bound_steady(input, m);
      return result;
    }
    result.bound = single ? lower_bound_1f1b(input, m) : lower_bound_any(outline_of(m), input);
    return result;
  }

  bool runs_on() const {
    return request_.runs_on && goes_on(layout_.schedule) && layout_.pipeline > 1;
  }

  double replay(const Pipeline& pipeline, StepBreakdown* breakdown) {
    const Schedule& schedule = schedule_of(pipeline.num_micro_batches);
    const bool keep = request_.keep_timeline && timeline_ == nullptr;
    const Replay replay = runs_on() ? replay_steady(schedule, pipeline.input)
                                    : replay_schedule(schedule, pipeline.input, keep);
    if (keep) {
      timeline_ = std::make_shared<const Timeline>(
          Timeline{runs_on() ? make_window(schedule, StepWindow::kSteady) : schedule, replay});
    }
    if (breakdown != nullptr) {
      const double p = layout_.pipeline;
      double busy = 0, transfer = 0, compute = 0;
      for (size_t i = 0; i < replay.rank_compute.size(); ++i) {
        busy += replay.rank_compute[i] / p;
        transfer += replay.rank_transfer[i] / p;
      }
      for (const StageTimes& stage : pipeline.input.stages) {
        compute += stage.forward + stage.backward;
      }
      const double share = compute > 0 ? busy / compute : 0;
      breakdown->tensor_communication = pipeline.communication * share;
      breakdown->gather = pipeline.gather * share;
      breakdown->gradients = pipeline.statistics * share;
      breakdown->compute =
          busy - breakdown->tensor_communication - breakdown->gather - breakdown->gradients;
      breakdown->transfer = transfer;
      breakdown->bubble = replay.seconds - busy - transfer;
    }
    return replay.seconds;
  }

  // The schedule without its rows, which a bound does not need.
  Schedule outline_of(int m) {
    return layout_.schedule == ScheduleKind::k2BW  // has too few micro-batches perhaps
               ? schedule_of(m)
               : Schedule{layout_.schedule,
                          layout_.pipeline,
                          layout_.virtual_stages,
                          m,
                          layout_.schedule == ScheduleKind::kZeroBubbleH1,
                          {}};
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
    return input.micro_batch_scale.empty() ? least : least * input.micro_batch_scale.back();
  }

  // Gradient reduction, tied parameters, update and weight gathers of the slowest stage.
  StepBreakdown after_pipeline() {
    StepBreakdown worst;
    double most = 0;
    for (int stage = 0; stage < layout_.pipeline; ++stage) {
      const double parameters = stage_parameters(stage);
      StepBreakdown own;
      own.gradients = reduce_seconds(stage, parameters) + tied_seconds(stage);
      own.gather = gather_seconds(stage, parameters);
      own.optimizer = optimizer_seconds(stage, parameters);
      if (own.gradients + own.gather + own.optimizer > most) {
        most = own.gradients + own.gather + own.optimizer;
        worst = own;
      }
    }
    return worst;
  }

  // What a stage's data ranks exchange once per step, in messages as large as the engine's.
  double collect(Collective kind, double bytes, int stage) {
    const GroupLinks& links = data_links(stage);
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

  double gather_seconds(int stage, double parameters) {
    return layout_.zero_stage == 1 || layout_.zero_stage == 2
               ? collect(Collective::kAllGather, engine_.gather_bytes * parameters, stage)
               : 0;
  }

  // Every data rank's subtrees to all, or to those that have the piece, and their sum.
  double exact_sum_seconds(int stage, double parameters) {
    const double bytes = engine_.reduce_bytes * parameters;
    const int pieces = layout_.zero_stage > 0 ? layout_.data : 1;
    const double seconds =
        pieces > 1 ? collect(Collective::kAllToAll,
                             bytes * std::max(layout_.exact.own, layout_.exact.exchanged / pieces),
                             stage)
                   : collect(Collective::kAllGather, bytes * layout_.exact.exchanged, stage);
    return seconds + cost_model(type_index(rank_of(stage, 0, 0)))
                         .stream_seconds(bytes * (layout_.exact.exchanged + 1) / pieces, 0);
  }

  double reduce_seconds(int stage, double parameters) {
    double seconds = 0;
    if (layout_.exact.exchanged > 0) {
      return exact_sum_seconds(stage, parameters);
    }
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
  double tied_seconds(int stage) {
    const double tied = profile_.block(profile_.num_blocks() - 1).shared_parameters;
    const bool holds = stage == 0 || stage == layout_.pipeline - 1;
    return layout_.pipeline > 1 && tied > 0 && holds ? collective_time(Collective::kAllReduce,
                                                                       engine_.reduce_bytes * tied,
                                                                       tied_links(),
                                                                       type(0).architecture)
                                                           .seconds
                                                     : 0;
  }

  // Norm and overflow check read the gradients twice, Adam reads them and reads and writes weights
  // and moments, and the buffer is cleared.
  double optimizer_seconds(int stage, double parameters) {
    const double shards = layout_.zero_stage >= 1 ? layout_.data : 1;
    const double bytes =
        parameters / shards *
            (3 * engine_.gradient_bytes + 2 * engine_.optimizer_bytes + engine_.update_bytes) +
        engine_.gradient_bytes * parameters;
    const CostModel& cost = cost_model(type_index(rank_of(stage, 0, 0)));
    if (layout_.offload_optimizer && !cost.device().is_cpu()) {
      // On state in the host's memory: what is read passes what is written, the other way.
      const double state = engine_.optimizer_bytes * parameters / shards;
      return cost.stream_seconds(bytes - 2 * state, 0) +
             state / host_link_bandwidth(cost.device().architecture);
    }
    return cost.stream_seconds(bytes, 0);
  }

  const ModelProfile& profile_;
  const Engine& engine_;
  double slowdown_;
  std::shared_ptr<const Timeline> timeline_;
  double last_backward_ = 0;
};

}  // namespace

std::vector<StageTimes> class_seconds(const StepRequest& request,
                                      const ModelProfile& profile,
                                      int device_type,
                                      RecomputeMode mode) {
  return StepPricer(request).class_seconds(profile, device_type, mode);
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
