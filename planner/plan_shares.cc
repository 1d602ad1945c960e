// How PlanSearch cuts the batch: micro-batches of one size for all data ranks, or, on a cluster of
// several kinds of devices, each size for each kind of data rank. In a uniform cluster there is
// nothing of the latter.
#include <algorithm>
#include <map>

#include "graph/base/error.h"
#include "parallel/micro_batches.h"
#include "planner/plan_search.h"
#include "planner/shares.h"

namespace trainrt {

namespace {

// Kinds of data ranks beyond which all have one size: so many sizes to the power of so many kinds.
constexpr int kMostKinds = 3;
// Micro-batches of each data rank, for each stage, up to which their sizes follow its pace.
constexpr int kMostPaced = 2;

bool same_padding(const GraphProfile& a, const GraphProfile& b) {
  return std::equal(a.padding.begin(),
                    a.padding.end(),
                    b.padding.begin(),
                    b.padding.end(),
                    [](const auto& x, const auto& y) {
                      return x.first == y.first && x.second.multiple == y.second.multiple;
                    });
}

}  // namespace

int PlanSearch::num_logical_shards() const {
  return static_cast<int>(std::min(request_.pins.logical_shards, request_.global_batch));
}

// An exact reduction keeps those of a logical shard together.
int PlanSearch::micro_batches_together(int64_t micro_batch) const {
  if (!request_.pins.exact_reduction) {
    return 1;
  }
  const int64_t shards = num_logical_shards();
  const int64_t largest = (request_.global_batch + shards - 1) / shards;
  return static_cast<int>((largest + micro_batch - 1) / micro_batch);
}

int PlanSearch::num_micro_batches(int64_t micro_batch) const {
  return request_.pins.exact_reduction
             ? num_logical_shards() * micro_batches_together(micro_batch)
             : static_cast<int>((request_.global_batch + micro_batch - 1) / micro_batch);
}

// Full ones, of which a step takes no more time than of what there is.
int PlanSearch::least_micro_batches(int64_t micro_batch) const {
  return static_cast<int>(std::max<int64_t>(1, request_.global_batch / micro_batch));
}

std::vector<DataShare> PlanSearch::shares_by(const std::vector<double>& weights,
                                             const Layout& layout) const {
  return request_.pins.exact_reduction
             ? make_exact_shares(request_.global_batch,
                                 layout.data,
                                 layout.micro_batch,
                                 weights,
                                 request_.pins.logical_shards)
             : make_shares(request_.global_batch, layout.data, layout.micro_batch, weights);
}

// Micro-batches of each data rank where the shares are pinned; else empty.
std::vector<int> PlanSearch::fixed_counts(const Layout& layout) const {
  std::vector<int> counts;
  for (const DataShare& share : request_.pins.data_shares) {
    counts.push_back(static_cast<int>(share.num_micro_batches));
  }
  if (!request_.pins.shares.empty()) {
    for (const DataShare& share : shares_by(request_.pins.shares, layout)) {
      counts.push_back(static_cast<int>(share.num_micro_batches));
    }
  }
  return counts;
}

// The same in whole micro-batches, of which a step takes no more time than of what is there.
std::vector<int> PlanSearch::least_counts(const Layout& layout) const {
  const bool exact = request_.pins.exact_reduction;
  if (request_.pins.data_shares.empty() && !(exact && !request_.pins.shares.empty())) {
    return fixed_counts(layout);
  }
  std::vector<int> counts;
  for (const DataShare& share : request_.pins.data_shares.empty()
                                    ? shares_by(request_.pins.shares, layout)
                                    : request_.pins.data_shares) {
    counts.push_back(
        static_cast<int>(share.num_samples / layout.micro_batch_size(share.data_rank)));
  }
  return counts;
}

// What the layout's counts of micro-batches make of the batch.
std::vector<DataShare> PlanSearch::shares_of(const Candidate& candidate) const {
  const Layout& layout = candidate.layout;
  if (!request_.pins.data_shares.empty()) {
    return request_.pins.data_shares;
  }
  if (!layout.micro_batch_sizes.empty()) {
    const std::vector<int64_t> samples =
        samples_of(request_.global_batch, layout.num_micro_batches, layout.micro_batch_sizes);
    TRAINRT_CHECK(!samples.empty(), "micro-batches without a sample");
    std::vector<DataShare> shares;
    for (int d = 0; d < layout.data; ++d) {
      const int64_t own = samples[static_cast<size_t>(d)];
      shares.push_back(
          {d, own, std::min(own, layout.micro_batch_size(d)), layout.micro_batches(d)});
    }
    return shares;
  }
  std::vector<double> weights = request_.pins.shares;
  if (weights.empty() && layout.num_micro_batches.size() > 1) {
    weights.assign(layout.num_micro_batches.begin(), layout.num_micro_batches.end());
  }
  return shares_by(weights, layout);
}

void PlanSearch::write_shares(Candidate* candidate) const {
  if (candidate->shares.empty()) {
    candidate->shares = shares_of(*candidate);
  }
}

void PlanSearch::cut_shares(Candidate* candidate) const {
  Layout& layout = candidate->layout;
  const bool full = layout.micro_batch_sizes.empty() && !request_.pins.exact_reduction &&
                    request_.global_batch % layout.micro_batch == 0;
  if (full || !request_.pins.data_shares.empty()) {  // given shares are cut already
    return;
  }
  take_shares(shares_of(*candidate), request_.pins, &layout);
  // Less than a micro-batch is one of another size, which takes longer than its part of a full one.
  for (std::vector<double>& scales : layout.micro_batch_scales) {
    if (scales.size() == 1) {
      scales.clear();
    }
  }
  if (!uniform_) {  // where counts are by data rank
    layout.num_micro_batches.resize(static_cast<size_t>(layout.data), layout.num_micro_batches[0]);
  }
}

void PlanSearch::uncut_shares(Candidate* candidate) const {
  if (request_.pins.data_shares.empty()) {
    candidate->layout.micro_batch_scales.clear();
  }
}

// As a plan is taken that says these shares (layout_fit(), add_degrees()): a data rank whose share
// is less than a micro-batch has micro-batches of that size.
void PlanSearch::take_written_shares(Candidate* candidate) {
  Layout& layout = candidate->layout;
  write_shares(candidate);
  if (!request_.pins.data_shares.empty()) {
    return;
  }
  const Degrees d = {layout.data, layout.tensor, layout.pipeline};
  int64_t largest = 0;
  for (const DataShare& share : candidate->shares) {
    largest = std::max(largest, share.micro_batch_size);
  }
  const int like = mixed_profile(largest, d, layout.sequence_parallel, candidate->profile)
                       .value_or(candidate->profile);
  candidate->profile = like;
  candidate->rank_profiles = mix_of(candidate->shares, d, layout.sequence_parallel, like);
  layout.micro_batch = profile(like).micro_batch;
  layout.micro_batch_sizes.clear();
  for (const int own : candidate->rank_profiles) {
    layout.micro_batch_sizes.push_back(profile(own).micro_batch);
  }
  take_shares(candidate->shares, request_.pins, &layout);
}

std::vector<int> PlanSearch::kinds_of_data_ranks(int degrees, int order) const {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  const std::vector<int>& devices =
      orders_[static_cast<size_t>(degrees)][static_cast<size_t>(order)];
  std::map<std::vector<int64_t>, int> known;
  std::vector<int> kinds;
  for (int data_rank = 0; data_rank < d.data; ++data_rank) {
    std::vector<int64_t> key;
    for (int stage = 0; stage < d.pipeline; ++stage) {
      for (int t = 0; t < d.tensor; ++t) {
        const int rank = (stage * d.data + data_rank) * d.tensor + t;
        const int index = devices.empty() ? rank : devices[static_cast<size_t>(rank)];
        key.push_back(request_.topology.device(index).type);
        key.push_back(request_.topology.reserved_bytes(index));
      }
    }
    kinds.push_back(known.emplace(std::move(key), static_cast<int>(known.size())).first->second);
  }
  return kinds;
}

// The profile at a size, under one plan with that of `like`: tensors cut and padded in the same
// way.
std::optional<int> PlanSearch::mixed_profile(int64_t micro_batch,
                                             const Degrees& d,
                                             bool sequence_parallel,
                                             int like) {
  const int index = profile_of(micro_batch, d, sequence_parallel);
  if (index < 0) {
    return std::nullopt;
  }
  const GraphProfile& own = *profiles_[static_cast<size_t>(index)];
  const GraphProfile& other = *profiles_[static_cast<size_t>(like)];
  return own.placements == other.placements && same_padding(own, other) ? std::optional<int>(index)
                                                                        : std::nullopt;
}

// Profiles by data rank for shares that are given; none where one does for all.
std::vector<int> PlanSearch::mix_of(const std::vector<DataShare>& shares,
                                    const Degrees& d,
                                    bool sequence_parallel,
                                    int like) {
  std::vector<int> mix;
  for (const DataShare& share : shares) {
    mix.push_back(
        share.num_samples == 0
            ? like
            : mixed_profile(share.micro_batch_size, d, sequence_parallel, like).value_or(like));
  }
  const bool alike = std::all_of(mix.begin(), mix.end(), [&](int own) { return own == like; });
  return alike ? std::vector<int>{} : mix;
}

// What a given plan's shares say; -1: one size for all.
int PlanSearch::pinned_mix(const Degrees& d, bool sequence_parallel, int like) {
  std::vector<int> mix = mix_of(request_.pins.data_shares, d, sequence_parallel, like);
  if (mix.empty()) {
    return -1;
  }
  mixes_.push_back(std::move(mix));
  return static_cast<int>(mixes_.size()) - 1;
}

// Whether data ranks on several kinds of devices may have sizes of their own.
bool PlanSearch::mixes_sizes(const Degrees& d) const {
  const PlanPins& pins = request_.pins;
  return !uniform_ && d.data > 1 && !pins.micro_batch.has_value() && !pins.exact_reduction &&
         pins.shares.empty() && pins.schedule != ScheduleKind::k2BW;
}

void PlanSearch::add_mixes(int degrees, bool sequence_parallel) {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  if (!mixes_sizes(d)) {
    return;
  }
  const int64_t samples = (request_.global_batch + d.data - 1) / d.data;
  const std::vector<int64_t> sizes = mixed_micro_batches(request_, samples);
  if (sizes.empty()) {  // each would make too many micro-batches
    return;
  }
  for (size_t order = 0; order < orders_[static_cast<size_t>(degrees)].size(); ++order) {
    const std::vector<int> kinds = kinds_of_data_ranks(degrees, static_cast<int>(order));
    const int num_kinds = *std::max_element(kinds.begin(), kinds.end()) + 1;
    if (num_kinds == 1 || num_kinds > kMostKinds) {
      continue;
    }
    std::vector<size_t> choice(static_cast<size_t>(num_kinds), 0);  // index into sizes, by kind
    for (bool more = true; more;) {
      std::vector<int64_t> chosen;
      for (const size_t own : choice) {
        chosen.push_back(sizes[own]);
      }
      add_mix(degrees, static_cast<int>(order), sequence_parallel, chosen, kinds);
      size_t digit = 0;
      while (digit < choice.size() && ++choice[digit] == sizes.size()) {
        choice[digit++] = 0;
      }
      more = digit < choice.size();
    }
  }
}

// Points at which data ranks have micro-batches of these sizes, by kind.
void PlanSearch::add_mix(int degrees,
                         int order,
                         bool sequence_parallel,
                         const std::vector<int64_t>& sizes,
                         const std::vector<int>& kinds) {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  const auto [least, largest] = std::minmax_element(sizes.begin(), sizes.end());
  const int like = *least == *largest ? -1 : profile_of(*largest, d, sequence_parallel);
  std::vector<int> mix;
  for (const int kind : like < 0 ? std::vector<int>{} : kinds) {
    const std::optional<int> own =
        mixed_profile(sizes[static_cast<size_t>(kind)], d, sequence_parallel, like);
    if (!own) {
      return;
    }
    mix.push_back(*own);
  }
  if (!mix.empty()) {
    mixes_.push_back(std::move(mix));
    add_shapes(degrees, order, like, static_cast<int>(mixes_.size()) - 1);
  }
}

// Seconds of a micro-batch on each kind of data rank, by its samples: of all sizes with a profile.
std::vector<std::map<int64_t, double>> PlanSearch::known_seconds(int degrees,
                                                                 int order,
                                                                 bool sequence_parallel,
                                                                 const std::vector<int>& kinds) {
  std::vector<std::map<int64_t, double>> seconds(
      static_cast<size_t>(*std::max_element(kinds.begin(), kinds.end())) + 1);
  for (const auto& [key, index] : profile_index_) {
    const auto& [micro_batch, tensor, sp] = key;
    if (tensor != degrees_[static_cast<size_t>(degrees)].tensor || sp != sequence_parallel ||
        index < 0) {
      continue;
    }
    Shape shape;
    shape.degrees = degrees;
    shape.order = order;
    shape.profile = index;
    const Candidate candidate = candidate_of(shape);
    const StepRequest request = step_request(candidate);
    for (size_t kind = 0; kind < seconds.size(); ++kind) {
      const auto data_rank =
          std::find(kinds.begin(), kinds.end(), static_cast<int>(kind)) - kinds.begin();
      seconds[kind][micro_batch] =
          bounds_.micro_batch_seconds(request, static_cast<int>(data_rank));
    }
  }
  return seconds;
}

// The batch in few micro-batches, as many on each data rank, of sizes that take all equally long:
// where that may beat the best step, since each size is one more profile.
bool PlanSearch::add_paced_mixes() {
  const size_t before = shapes_.size();
  if (best_ >= 1e300 || request_.objective != Objective::kThroughput) {
    return false;
  }
  for (size_t degrees = 0; degrees < degrees_.size(); ++degrees) {
    for (size_t i = 0; mixes_sizes(degrees_[degrees]) && i < 2 * orders_[degrees].size(); ++i) {
      add_paced_mixes(static_cast<int>(degrees), static_cast<int>(i / 2), i % 2 == 1);
    }
  }
  return shapes_.size() > before;
}

void PlanSearch::add_paced_mixes(int degrees, int order, bool sequence_parallel) {
  const Degrees& d = degrees_[static_cast<size_t>(degrees)];
  const std::vector<int> kinds = kinds_of_data_ranks(degrees, order);
  const int num_kinds = *std::max_element(kinds.begin(), kinds.end()) + 1;
  if (num_kinds == 1 || num_kinds > kMostKinds ||
      !profiles_sequence_parallel(d, sequence_parallel)) {
    return;
  }
  const std::vector<std::map<int64_t, double>> seconds =
      known_seconds(degrees, order, sequence_parallel, kinds);
  std::vector<std::vector<int64_t>> mixes;
  std::set<ProfileKey> profiles;
  for (int each = d.pipeline; each <= kMostPaced * d.pipeline && seconds[0].size() > 1 &&
                              int64_t{each} * d.data <= request_.global_batch;
       each *= 2) {
    const PacedSizes paced = paced_sizes(request_.global_batch, each, seconds, kinds);
    if (each * paced.seconds < best_seconds_) {
      mixes.push_back(paced.sizes);
      for (const int64_t size : paced.sizes) {
        profiles.emplace(size, d.tensor, sequence_parallel, splitting());
      }
    }
  }
  make_profiles(profiles);
  for (const std::vector<int64_t>& sizes : mixes) {
    add_mix(degrees, order, sequence_parallel, sizes, kinds);
  }
}

}  // namespace trainrt
