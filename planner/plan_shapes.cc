// The space of PlanSearch: all points, with what no step of one can beat. For each, profiles of the
// model must be there, and which sizes of micro-batches are worth one is told by the bounds.
#include <algorithm>
#include <memory>

#include "planner/parallel_for.h"
#include "planner/plan_search.h"

namespace trainrt {

namespace {

constexpr int kMostVirtualStages = 6;
constexpr int kLongPipeline = 8;
// Larger micro-batches are tried while each lowers the time of a sample by so much; a data rank's
// whole share always, where it is small.
constexpr double kWorthMore = 0.99;
constexpr int64_t kSmallShare = 64;

}  // namespace

// Degrees that have profiles in common are a part, which one thread does; a part's shapes then go
// where they would stand had all been done one after the other.
void PlanSearch::add_all_degrees() {
  struct Part {
    int tensor = 1;
    bool sequence_parallel = false;
    std::unique_ptr<PlanSearch> search;
    struct Degree {
      size_t end = 0;  // of its shapes
      std::optional<std::pair<int, int>> too_few_for_2bw;
    };
    std::map<size_t, Degree> degrees;
    size_t next = 0;  // shape
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < degrees_.size(); ++i) {
    for (const bool sp : {false, true}) {
      if (!profiles_sequence_parallel(degrees_[i], sp)) {
        continue;
      }
      auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& known) {
        return known.tensor == degrees_[i].tensor && known.sequence_parallel == sp;
      });
      if (part == parts.end()) {
        part = parts.insert(part, Part{degrees_[i].tensor, sp, nullptr, {}, 0});
      }
      part->degrees.emplace(i, Part::Degree{});
    }
  }
  parallel_for(parts.size(), [&](size_t i, size_t) {
    Part& part = parts[i];
    part.search = std::make_unique<PlanSearch>(request_, model_);
    part.search->degrees_ = degrees_;
    part.search->orders_.resize(degrees_.size());
    part.search->splits_for_memory_ = splits_for_memory_;
    for (auto& [degrees, own] : part.degrees) {
      part.search->too_few_for_2bw_.reset();
      part.search->add_degrees(static_cast<int>(degrees), part.sequence_parallel);
      own = {part.search->shapes_.size(), part.search->too_few_for_2bw_};
    }
  });
  for (Part& part : parts) {
    take_part(part.search.get());
  }
  orders_.resize(degrees_.size());
  for (size_t i = 0; i < degrees_.size(); ++i) {
    for (Part& part : parts) {  // without sequence parallelism first
      const auto own = part.degrees.find(i);
      if (own == part.degrees.end()) {
        continue;
      }
      orders_[i] = std::move(part.search->orders_[i]);
      for (; part.next < own->second.end; ++part.next) {
        shapes_.push_back(part.search->shapes_[part.next]);
      }
      note_too_few_for_2bw(own->second.too_few_for_2bw);
    }
  }
}

// Profiles, and mixes of them, with indices as they are here.
void PlanSearch::take_part(PlanSearch* part) {
  const auto first_profile = static_cast<int>(profiles_.size());
  const auto first_mix = static_cast<int>(mixes_.size());
  for (std::vector<int>& mix : part->mixes_) {
    for (int& own : mix) {
      own += first_profile;
    }
    mixes_.push_back(std::move(mix));
  }
  for (const auto& [key, index] : part->profile_index_) {
    profile_index_[key] = index < 0 ? index : index + first_profile;
  }
  for (Shape& shape : part->shapes_) {
    shape.profile += first_profile;
    shape.mix += shape.mix < 0 ? 0 : first_mix;
  }
  engine_ = part->profiles_.empty() ? engine_ : part->engine_;
  profiles_.insert(profiles_.end(), part->profiles_.begin(), part->profiles_.end());
}

void PlanSearch::add_degrees(int degrees, bool sequence_parallel) {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  std::vector<std::vector<int>>& orders = orders_[static_cast<size_t>(degrees)];
  orders = candidate_device_orders(request_, d);
  const int64_t samples = (request_.global_batch + d.data - 1) / d.data;
  double of_sample = 1e300;
  bool saturated = false;
  for (const int64_t b : candidate_micro_batches(request_, samples)) {
    if (saturated && (b != samples || samples > kSmallShare)) {
      continue;
    }
    const int index = profile_of(b, d, sequence_parallel);
    const size_t first = shapes_.size();
    for (size_t order = 0; index >= 0 && order < orders.size(); ++order) {
      add_shapes(degrees, static_cast<int>(order), index, pinned_mix(d, sequence_parallel, index));
    }
    double least = 1e300;
    for (size_t i = first; i < shapes_.size(); ++i) {
      least = std::min(least, shapes_[i].bound_seconds);
    }
    least /= static_cast<double>((samples + b - 1) / b * b);
    saturated = b >= kAlwaysTried && least > kWorthMore * of_sample;
    of_sample = least;
  }
  add_mixes(degrees, sequence_parallel);
}

void PlanSearch::add_shapes(int degrees, int order, int profile_index, int mix) {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  Shape shape;
  shape.degrees = degrees;
  shape.order = order;
  shape.profile = profile_index;
  shape.mix = mix;
  Candidate candidate = candidate_of(shape);
  Layout& layout = candidate.layout;
  const StepRequest request = step_request(candidate);
  const int total =
      mix < 0 ? least_micro_batches(layout.micro_batch) : static_cast<int>(request_.global_batch);
  const std::vector<int> counts = least_counts(layout);
  const double fraction = request_.pins.exact_reduction || mix >= 0
                              ? 0
                              : std::max(0.0,
                                         static_cast<double>(request_.global_batch) /
                                                 static_cast<double>(layout.micro_batch) -
                                             total);
  const double price = hourly_price(layout);
  for (const auto& [recompute, as_needed] : recomputes(d)) {
    for (const auto& [v, kind] : schedules(d, profile(profile_index).num_blocks())) {
      if (const int each = num_micro_batches(layout.micro_batch) / d.data;
          kind == ScheduleKind::k2BW && each < d.pipeline) {
        note_too_few_for_2bw(std::make_pair(d.pipeline, each));
        continue;
      }
      for (const int zero : zero_stages(d)) {
        layout.recompute = shape.recompute = recompute;
        layout.recompute_as_needed = shape.as_needed = as_needed;
        layout.virtual_stages = shape.virtual_stages = v;
        layout.schedule = shape.schedule = kind;
        layout.zero_stage = shape.zero_stage = zero;
        shape.bound_seconds = bounds_.least_seconds(request, total, fraction, counts);
        switch (request_.objective) {
          case Objective::kThroughput:
            shape.bound = shape.bound_seconds;
            break;
          case Objective::kMemory:
            break;
          case Objective::kDevices:
            shape.bound = layout.world_size() + 1e-9 * shape.bound_seconds;
            break;
          case Objective::kCost:
            shape.bound = price * shape.bound_seconds / 3600;
            break;
        }
        shapes_.push_back(shape);
      }
    }
  }
}

// The pair with the least difference is kept.
void PlanSearch::note_too_few_for_2bw(const std::optional<std::pair<int, int>>& found) {
  if (found && (!too_few_for_2bw_ || found->first - found->second <
                                         too_few_for_2bw_->first - too_few_for_2bw_->second)) {
    too_few_for_2bw_ = found;
  }
}

std::vector<std::pair<int, ScheduleKind>> PlanSearch::schedules(const Degrees& d,
                                                                int blocks) const {
  const PlanPins& pins = request_.pins;
  std::vector<std::pair<int, ScheduleKind>> found;
  const auto offer = [&](int v, ScheduleKind kind) {
    if (pins.virtual_stages.value_or(v) == v && pins.schedule.value_or(kind) == kind &&
        d.pipeline * v <= blocks) {
      found.emplace_back(v, kind);
    }
  };
  offer(1, ScheduleKind::k1F1B);
  const bool pinned = pins.schedule.has_value();
  if (d.pipeline > 1 || pinned) {
    offer(1, ScheduleKind::kZeroBubbleH1);
    offer(1, ScheduleKind::kGPipe);
  }
  if (pinned) {
    offer(1, ScheduleKind::k2BW);
    offer(1, ScheduleKind::kInterleaved);
  }
  const int most = std::max(kMostVirtualStages, pins.virtual_stages.value_or(1));
  for (int v = 2; (d.pipeline > 1 || pins.virtual_stages.has_value()) && v <= most; ++v) {
    offer(v, ScheduleKind::kInterleaved);
  }
  return found;
}

// Blocks run again where the memory demands it, and nowhere else: unless that is what counts, or
// the ranks of a long pipeline would become as many kinds, whose programs are compiled each.
std::vector<std::pair<RecomputeMode, bool>> PlanSearch::recomputes(const Degrees& d) const {
  if (request_.pins.recompute.has_value()) {
    return {{*request_.pins.recompute, false}};
  }
  if (request_.objective == Objective::kMemory || d.pipeline > kLongPipeline) {
    return {{RecomputeMode::kNone, false},
            {RecomputeMode::kSelective, false},
            {RecomputeMode::kFull, false}};
  }
  return {{RecomputeMode::kNone, false}, {RecomputeMode::kNone, true}};
}

// Stage 3 gathers weights for every micro-batch of every stage: offered without a pipeline.
std::vector<int> PlanSearch::zero_stages(const Degrees& d) const {
  if (request_.pins.zero_stage.has_value()) {
    return {*request_.pins.zero_stage};
  }
  return d.data == 1       ? std::vector<int>{0}
         : d.pipeline == 1 ? std::vector<int>{0, 1, 2, 3}
                           : std::vector<int>{0, 1, 2};
}

}  // namespace trainrt
