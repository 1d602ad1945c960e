// What the search knows of the model at each micro-batch size and tensor degree.
#include <algorithm>
#include <numeric>
#include <set>

#include "planner/parallel_for.h"
#include "planner/plan_search.h"

namespace trainrt {

const SizedModel& PlanSearch::model_at(int64_t micro_batch) const {
  return model_->models.at(micro_batch, request_.pins.micro_batch.has_value());
}

const ModelProfile& PlanSearch::profile(int index) const {
  return profiles_[static_cast<size_t>(index)]->profile;
}

// The profiles that every search of these degrees looks at: one after the other they would take
// most of the time before the first candidate.
void PlanSearch::make_first_profiles() {
  std::set<ProfileKey> wanted;
  for (const Degrees& d : degrees_) {
    const int64_t samples = (request_.global_batch + d.data - 1) / d.data;
    for (const int64_t b : candidate_micro_batches(request_, samples)) {
      for (const bool sp : {false, true}) {
        if (b <= kAlwaysTried && profiles_sequence_parallel(d, sp)) {
          wanted.emplace(b, d.tensor, sp, splitting());
        }
      }
    }
  }
  make_profiles(wanted);
}

void PlanSearch::make_profiles(const std::set<ProfileKey>& wanted) {
  const std::vector<ProfileKey> keys(wanted.begin(), wanted.end());
  parallel_for(keys.size(), [&](size_t i, size_t) { profile_at(keys[i]); });
}

std::shared_ptr<const GraphProfile> PlanSearch::profile_at(const ProfileKey& key) {
  return model_->profiles.at(key, [&] { return make_profile(key); });
}

std::shared_ptr<const GraphProfile> PlanSearch::make_profile(const ProfileKey& key) const {
  const auto& [micro_batch, tensor, sequence_parallel, splitting] = key;
  const CostModel cost(request_.topology.type_of(0), request_.precision);
  std::vector<int> group(static_cast<size_t>(tensor));
  std::iota(group.begin(), group.end(), 0);
  const GroupLinks links = group_links(request_.topology, group, 1);
  const bool half = request_.precision == "bf16" || request_.precision == "fp16";
  GraphProfileRequest wanted;
  const SizedModel& model = model_at(micro_batch);
  wanted.model = &model.blocks;
  wanted.memory = model.as_run ? &*model.as_run : nullptr;
  wanted.cost = &cost;
  wanted.tensor_group = &links;
  wanted.tensor_parallel = tensor;
  wanted.sequence_parallel = sequence_parallel;
  wanted.float_bytes = half ? 2 : 4;
  wanted.pins = &block_pins_;
  wanted.choose_padding = true;
  wanted.split_at_any_price = splitting == Splitting::kAtAnyPrice;
  wanted.split_for_memory = splitting == Splitting::kForMemory;
  const DeviceSpec device =
      request_.device_spec ? request_.device_spec(request_.topology, 0) : DeviceSpec{};
  wanted.device = request_.device_spec ? &device : nullptr;
  auto made = std::make_shared<GraphProfile>(graph_profile(wanted));
  if (request_.tokens_per_sample > 0) {
    made->profile.tokens_per_sample = request_.tokens_per_sample;
  }
  return made;
}

// -1 when nothing can be split over the tensor group.
int PlanSearch::profile_of(int64_t micro_batch, const Degrees& d, bool sequence_parallel) {
  const auto key = std::make_tuple(micro_batch, d.tensor, sequence_parallel);
  const auto known = profile_index_.find(key);
  if (known != profile_index_.end()) {
    return known->second;
  }
  std::shared_ptr<const GraphProfile> made =
      profile_at({micro_batch, d.tensor, sequence_parallel, splitting()});
  const bool placed = !request_.pins.placements.empty();
  // What the pins ask for is done, though it does not pay.
  const bool asked = std::all_of(
      degrees_.begin(), degrees_.end(), [](const Degrees& each) { return each.tensor > 1; });
  if (d.tensor > 1 && made->placements.empty() && asked && !placed) {
    made = profile_at({micro_batch, d.tensor, sequence_parallel, Splitting::kAtAnyPrice});
  }
  engine_ = own_engine(request_.precision, made->optimizer_bytes);
  const std::vector<DeviceType>& types = request_.topology.types;
  if (std::all_of(types.begin(), types.end(), [](const DeviceType& t) { return t.is_cpu(); })) {
    engine_.overlap_gradients = engine_.overlap_gather = false;  // CPU ranks do one after the other
  }
  int& index = profile_index_[key];
  index = -1;
  if (d.tensor == 1 || !made->placements.empty() || placed) {
    index = static_cast<int>(profiles_.size());
    profiles_.push_back(std::move(made));
  }
  return index;
}

// Whether the search looks at these degrees with sequence parallelism, or without.
bool PlanSearch::profiles_sequence_parallel(const Degrees& d, bool sp) const {
  if (d.tensor == 1) {
    return !sp && (!splits_for_memory_ || splits_first_);
  }
  return request_.pins.sequence_parallel.value_or(sp) == sp;
}

}  // namespace trainrt
