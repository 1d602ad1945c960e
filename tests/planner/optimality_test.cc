// The search against all plans of its space, on small random models and clusters: uneven layers,
// mixed devices, memory limits that bite. The brute force knows nothing of bounds, balanced cuts or
// shares by speed; it has in common with the search what a plan is and what predict_step() says.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <random>

#include "parallel/micro_batches.h"
#include "planner/candidates.h"
#include "planner/planner.h"
#include "planner/shares.h"
#include "planner/step_memory.h"
#include "tests/support/layered_model.h"

namespace trainrt {
namespace {

class RandomCase {
 public:
  explicit RandomCase(uint32_t seed) : random_(seed) {
    const int layers = pick(1, 4);
    for (int i = 0; i < layers; ++i) {
      ffn_.push_back(int64_t{64} << pick(0, 4));
    }
    hidden_ = int64_t{64} << pick(0, 3);
    seq_ = int64_t{8} << pick(0, 5);
    request_.model.training = [this](int64_t micro_batch) {
      return testing::layered_model(micro_batch, seq_, hidden_, ffn_, 32);
    };
    request_.precision = "bf16";
    request_.global_batch = pick(1, 7);
    draw_cluster();
    limit_memory();
  }

  const PlanRequest& request() const { return request_; }
  int pick(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }

 private:
  void draw_cluster() {
    const int devices = pick(1, 4), kinds = pick(1, 2);
    const char* const architectures[] = {"ampere", "volta"};
    std::vector<int> types;
    for (int k = 0; k < kinds; ++k) {
      DeviceType type;
      type.name = std::string("card") + std::to_string(k);
      type.architecture = architectures[k];
      type.memory_bytes = int64_t{1} << 40;
      type.memory_bandwidth = 200e9 * pick(1, 6);
      type.num_sms = 20 * pick(1, 4);
      type.flops = {{"fp32", 5e12 * pick(1, 4)}, {"bf16", 20e12 * pick(1, 6)}};
      types.push_back(request_.topology.add_type(type));
    }
    const char* const links[] = {"pcie3", "pcie4", "nvlink3"};
    const LinkType link = find_link(links[pick(0, 2)]);
    std::vector<int> host;
    for (int i = 0; i < devices; ++i) {
      host.push_back(types[static_cast<size_t>(pick(0, kinds - 1))]);
    }
    const int cut = devices % 2 == 0 && pick(0, 2) == 0 ? devices / 2 : devices;
    const LinkType inter = find_link("infiniband-hdr");
    request_.topology.add_host({host.begin(), host.begin() + cut}, link, inter, 1);
    if (cut < devices) {
      request_.topology.add_host({host.begin() + cut, host.end()}, link, inter, 1);
    }
  }

  // Around what the fastest plan takes without a limit.
  void limit_memory() {
    if (pick(0, 2) == 0) {
      return;
    }
    const StepPrediction step = make_plan(request_).chosen.prediction;
    const auto peak = static_cast<double>(step.peak_bytes());
    for (DeviceType& type : request_.topology.types) {
      type.memory_bytes =
          step.stages.at(0).reserved_bytes + static_cast<int64_t>(peak * (0.3 + 0.1 * pick(0, 8)));
    }
  }

  std::mt19937 random_;
  std::vector<int64_t> ffn_;
  int64_t hidden_ = 0, seq_ = 0;
  PlanRequest request_;
};

// All ways to write `total` as a sum of `parts` numbers of at least `least`.
void for_each_sum(int total,
                  int parts,
                  int least,
                  const std::function<void(const std::vector<int>&)>& visit) {
  std::vector<int> sum;
  const std::function<void(int)> extend = [&](int left) {
    if (static_cast<int>(sum.size()) == parts - 1) {
      if (left >= least) {
        sum.push_back(left);
        visit(sum);
        sum.pop_back();
      }
      return;
    }
    for (int own = least; own <= left; ++own) {
      sum.push_back(own);
      extend(left - own);
      sum.pop_back();
    }
  };
  extend(total);
}

std::string text(const Layout& layout) {
  std::string all = concat("dp ",
                           layout.data,
                           " tp ",
                           layout.tensor,
                           " pp ",
                           layout.pipeline,
                           " x ",
                           layout.virtual_stages,
                           " ",
                           schedule_name(layout.schedule),
                           " zero ",
                           layout.zero_stage,
                           " sp ",
                           layout.sequence_parallel,
                           " micro-batch ",
                           layout.micro_batch);
  const std::vector<std::pair<const char*, const std::vector<int>*>> lists = {
      {" cuts", &layout.first_block},
      {" counts", &layout.num_micro_batches},
      {" devices", &layout.devices}};
  for (const int64_t size : layout.micro_batch_sizes) {
    all += concat(" size ", size);
  }
  for (const RecomputeMode mode : layout.block_recompute) {
    all += concat(" ", recompute_name(mode));
  }
  for (const auto& [name, list] : lists) {
    all += name;
    for (const int item : *list) {
      all += concat(" ", item);
    }
  }
  return all;
}

class BruteForce {
 public:
  // `found`: whose sizes by data rank, in between the powers of two, are tried beside those.
  BruteForce(const PlanRequest& request, const Layout& found) : request_(request), found_(found) {}

  const Layout& layout() const { return best_layout_; }

  // Seconds of the fastest plan that fits; above 1e300 if there is none.
  double run() {
    all_degrees();
    if (best_ >= 1e300) {  // tensors are cut for memory where nothing fits otherwise
      for_memory_ = true;
      all_degrees();
    }
    return best_;
  }

 private:
  void all_degrees() {
    const int devices = request_.topology.num_devices();
    for (int t = 1; t <= devices; ++t) {
      for (int p = 1; p <= devices; ++p) {
        if (devices % (t * p) == 0 && fits_host(t)) {
          degrees({devices / t / p, t, p});
        }
      }
    }
  }

  bool fits_host(int t) const {
    return std::all_of(
        request_.topology.hosts.begin(), request_.topology.hosts.end(), [&](const Host& host) {
          return t <= static_cast<int>(host.devices.size());
        });
  }

  void degrees(const Degrees& d) {
    if (d.data > request_.global_batch) {
      return;
    }
    const int64_t samples = (request_.global_batch + d.data - 1) / d.data;
    for (const bool sequence_parallel : {false, true}) {
      if (sequence_parallel && d.tensor == 1) {
        continue;
      }
      std::map<int64_t, GraphProfile> profiles;
      every_size_.clear();
      for (int64_t b = 1; b <= request_.global_batch; ++b) {
        const bool power = (b & (b - 1)) == 0;
        const bool even = samples % b == 0 && samples / b <= 4;  // parts of a share
        GraphProfile made = profile_at(b, d.tensor, sequence_parallel);
        if ((power || even) && (d.tensor == 1 || !made.placements.empty())) {
          engine_ = own_engine(request_.precision, made.optimizer_bytes);
          profiles.emplace(b, made);
        }
        every_size_.emplace(b, std::move(made));
      }
      for (const std::vector<int>& order : candidate_device_orders(request_, d)) {
        for (const auto& [b, made] : profiles) {
          if (b <= samples) {
            profile_ = &made.profile;
            rank_profiles_.clear();
            layouts(d, order);
          }
        }
        mixes(d, order, profiles);
        found_sizes(d, order);
      }
    }
  }

  GraphProfile profile_at(int64_t micro_batch, int tensor, bool sequence_parallel) const {
    const ModelBlocks model = model_blocks(request_.model.training(micro_batch), micro_batch);
    const CostModel cost(request_.topology.type_of(0), request_.precision);
    std::vector<int> group;
    for (int i = 0; i < tensor; ++i) {
      group.push_back(i);
    }
    const GroupLinks links = group_links(request_.topology, group, 1);
    GraphProfileRequest wanted{&model, &cost, &links, tensor, sequence_parallel, 2};
    wanted.split_for_memory = for_memory_;
    wanted.choose_padding = true;
    return graph_profile(wanted);
  }

  void found_sizes(const Degrees& d, const std::vector<int>& order) {
    if (std::make_tuple(d.data, d.tensor, d.pipeline, order) !=
        std::tie(found_.data, found_.tensor, found_.pipeline, found_.devices)) {
      return;
    }
    rank_profiles_.clear();
    for (const int64_t size : found_.micro_batch_sizes) {
      rank_profiles_.push_back(&every_size_.at(size).profile);
    }
    if (!rank_profiles_.empty()) {
      profile_ = *std::max_element(
          rank_profiles_.begin(), rank_profiles_.end(), [](const auto* a, const auto* b) {
            return a->micro_batch < b->micro_batch;
          });
      layouts(d, order);
    }
  }

  // Each size for each kind of data rank, where they are of several.
  void mixes(const Degrees& d,
             const std::vector<int>& order,
             const std::map<int64_t, GraphProfile>& profiles) {
    std::map<std::vector<int>, const GraphProfile*> chosen;
    std::vector<std::vector<int>> kinds;
    for (int data_rank = 0; data_rank < d.data; ++data_rank) {
      std::vector<int>& types = kinds.emplace_back();
      for (int stage = 0; stage < d.pipeline; ++stage) {
        for (int t = 0; t < d.tensor; ++t) {
          const int rank = (stage * d.data + data_rank) * d.tensor + t;
          const int device = order.empty() ? rank : order[static_cast<size_t>(rank)];
          types.push_back(request_.topology.device(device).type);
        }
      }
      chosen[types] = nullptr;
    }
    if (chosen.size() == 1 || chosen.size() > 3) {
      return;
    }
    const std::function<void(std::map<std::vector<int>, const GraphProfile*>::iterator)> choose =
        [&](std::map<std::vector<int>, const GraphProfile*>::iterator kind) {
          if (kind != chosen.end()) {
            for (const auto& [size, made] : profiles) {
              kind->second = &made;
              choose(std::next(kind));
            }
            return;
          }
          const GraphProfile* largest = chosen.begin()->second;
          bool one_plan = true, one_size = true;
          for (const auto& [types, made] : chosen) {
            one_plan = one_plan && made->placements == largest->placements;
            one_size = one_size && made == chosen.begin()->second;
            largest = made->profile.micro_batch > largest->profile.micro_batch ? made : largest;
          }
          if (one_plan && !one_size) {
            profile_ = &largest->profile;
            rank_profiles_.clear();
            for (const std::vector<int>& types : kinds) {
              rank_profiles_.push_back(&chosen.at(types)->profile);
            }
            layouts(d, order);
          }
        };
    choose(chosen.begin());
  }

  void layouts(const Degrees& d, const std::vector<int>& order) {
    Layout layout;
    layout.data = d.data;
    layout.tensor = d.tensor;
    layout.pipeline = d.pipeline;
    layout.sequence_parallel = profile_->sequence_parallel;
    layout.micro_batch = profile_->micro_batch;
    for (const ModelProfile* own : rank_profiles_) {
      layout.micro_batch_sizes.push_back(own->micro_batch);
    }
    layout.devices = order;
    for (int zero = 0; zero <= 3; ++zero) {
      if ((zero > 0 && d.data == 1) || (zero == 3 && d.pipeline > 1)) {
        continue;
      }
      layout.zero_stage = zero;
      for (int v = 1; v <= 6 && v * d.pipeline <= profile_->num_blocks(); ++v) {
        layout.virtual_stages = v;
        if (v > 1 && d.pipeline > 1) {
          layout.schedule = ScheduleKind::kInterleaved;
          cuts(&layout);
        } else if (v == 1) {
          for (const ScheduleKind kind :
               {ScheduleKind::k1F1B, ScheduleKind::kGPipe, ScheduleKind::kZeroBubbleH1}) {
            layout.schedule = kind;
            cuts(&layout);
          }
        }
      }
    }
  }

  void cuts(Layout* layout) {
    const int stages = layout->pipeline * layout->virtual_stages;
    for_each_sum(profile_->num_blocks(), stages, 1, [&](const std::vector<int>& sizes) {
      layout->first_block.assign(1, 0);
      for (int s = 0; s + 1 < stages; ++s) {
        layout->first_block.push_back(layout->first_block.back() + sizes[static_cast<size_t>(s)]);
      }
      shares(layout);
    });
  }

  void shares(Layout* layout) {
    if (!layout->micro_batch_sizes.empty()) {
      layout->num_micro_batches.assign(static_cast<size_t>(layout->data), 0);
      sized_shares(layout, 0, 0, 0);
      return;
    }
    const int64_t b = layout->micro_batch;
    const auto total = static_cast<int>((request_.global_batch + b - 1) / b);
    layout->last_micro_batch =
        total == 1 && layout->data == 1 && request_.global_batch % b != 0
            ? static_cast<double>(request_.global_batch % b) / static_cast<double>(b)
            : 1;
    for_each_sum(total, layout->data, 0, [&](const std::vector<int>& counts) {
      layout->num_micro_batches = counts;
      price(*layout);
    });
  }

  // All counts that the samples suffice for, and that suffice for the samples.
  void sized_shares(Layout* layout, int data_rank, int64_t least, int64_t most) {
    if (data_rank == layout->data) {
      if (most >= request_.global_batch) {
        price(*layout);
      }
      return;
    }
    const int64_t size = layout->micro_batch_size(data_rank);
    int& count = layout->num_micro_batches[static_cast<size_t>(data_rank)];
    sized_shares(layout, data_rank + 1, least, most);
    for (count = 1; least + size * (count - 1) + 1 <= request_.global_batch; ++count) {
      sized_shares(layout, data_rank + 1, least + size * (count - 1) + 1, most + size * count);
    }
    count = 0;
  }

  // Every kind of recompute for every block. A rank's memory hangs on its own blocks alone, and a
  // step on the time that they take: so of each rank the quickest way that fits is the best.
  void price(Layout layout) {
    StepRequest step;
    step.profile = profile_;
    step.rank_profiles = rank_profiles_;
    step.topology = &request_.topology;
    step.engine = &engine_;
    step.precision = request_.precision;
    step.layout = &layout;
    layout.recompute_as_needed = true;
    const StageMemories memories(step);
    for (int stage = 0; stage < layout.pipeline; ++stage) {
      if (!memories.of(stage).fits() && !recompute(step, memories, stage, &layout)) {
        return;
      }
    }
    const double seconds = seconds_as_cut(layout);
    if (seconds < best_) {
      best_ = seconds;
      best_layout_ = layout;
    }
  }

  // With micro-batches as the batch is cut into them: the last ones may be short, and a data rank
  // whose share is less than a micro-batch has micro-batches of that size.
  double seconds_as_cut(Layout layout) const {
    std::vector<DataShare> shares;
    if (layout.micro_batch_sizes.empty()) {
      shares = make_shares(request_.global_batch,
                           layout.data,
                           layout.micro_batch,
                           {layout.num_micro_batches.begin(), layout.num_micro_batches.end()});
    } else {
      const std::vector<int64_t> samples =
          samples_of(request_.global_batch, layout.num_micro_batches, layout.micro_batch_sizes);
      for (int d = 0; d < layout.data; ++d) {
        const int64_t own = samples[static_cast<size_t>(d)];
        shares.push_back(
            {d, own, std::min(own, layout.micro_batch_size(d)), layout.micro_batches(d)});
      }
    }
    const auto alike = [&](int64_t size, const GraphProfile& other) {
      const GraphProfile& own = every_size_.at(size);
      return own.placements == other.placements ? &own : &other;
    };
    int64_t largest = 0;
    for (const DataShare& share : shares) {
      largest = std::max(largest, share.micro_batch_size);
    }
    const GraphProfile* like = alike(largest, every_size_.at(layout.micro_batch));
    StepRequest step;
    step.profile = &like->profile;
    layout.micro_batch = like->profile.micro_batch;
    layout.micro_batch_sizes.clear();
    for (const DataShare& share : shares) {
      const GraphProfile* own =
          share.num_samples == 0 ? like : alike(share.micro_batch_size, *like);
      step.rank_profiles.push_back(&own->profile);
      layout.micro_batch_sizes.push_back(own->profile.micro_batch);
    }
    take_shares(shares, PlanPins(), &layout);
    layout.num_micro_batches.resize(static_cast<size_t>(layout.data), layout.num_micro_batches[0]);
    step.topology = &request_.topology;
    step.engine = &engine_;
    step.precision = request_.precision;
    step.layout = &layout;
    step.time_only = true;
    return predict_step(step).seconds;
  }

  bool recompute(const StepRequest& step,
                 const StageMemories& memories,
                 int stage,
                 Layout* layout) {
    std::vector<size_t> blocks;
    const auto end = static_cast<size_t>(profile_->num_blocks());
    for (auto s = static_cast<size_t>(stage); s < layout->first_block.size();
         s += static_cast<size_t>(layout->pipeline)) {
      const size_t last = s + 1 < layout->first_block.size()
                              ? static_cast<size_t>(layout->first_block[s + 1])
                              : end;
      for (auto b = static_cast<size_t>(layout->first_block[s]); b < last; ++b) {
        blocks.push_back(b);
      }
    }
    layout->block_recompute.resize(end, RecomputeMode::kNone);
    const int type =
        request_.topology.device(layout->device(stage * layout->data * layout->tensor)).type;
    std::array<std::vector<StageTimes>, 3> seconds;
    for (const RecomputeMode mode : kModes) {
      seconds[static_cast<size_t>(mode)] = class_seconds(step, *profile_, type, mode);
    }
    std::vector<std::pair<double, std::vector<RecomputeMode>>> ways;
    std::vector<RecomputeMode> way(blocks.size(), RecomputeMode::kNone);
    const std::function<void(size_t, double)> extend = [&](size_t at, double longer) {
      if (at == blocks.size()) {
        ways.emplace_back(longer, way);
        return;
      }
      const auto block_class = static_cast<size_t>(profile_->blocks[blocks[at]]);
      for (const RecomputeMode mode : kModes) {
        way[at] = mode;
        extend(at + 1, longer + seconds[static_cast<size_t>(mode)][block_class].backward);
      }
    };
    extend(0, 0);
    std::sort(ways.begin(), ways.end());
    for (const auto& [longer, modes] : ways) {
      for (size_t i = 0; i < blocks.size(); ++i) {
        layout->block_recompute[blocks[i]] = modes[i];
      }
      if (memories.of(stage).fits()) {
        return true;
      }
    }
    return false;
  }

  static constexpr RecomputeMode kModes[] = {
      RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull};
  const PlanRequest& request_;
  const Layout& found_;
  const ModelProfile* profile_ = nullptr;
  std::vector<const ModelProfile*> rank_profiles_;  // by data rank, where sizes differ
  std::map<int64_t, GraphProfile> every_size_;
  bool for_memory_ = false;
  Engine engine_;
  double best_ = 1e301;
  Layout best_layout_;
};

// Cases [first, first + count): how many of them the search solves to the last bit is counted.
void compare(uint32_t first, int count) {
  int equal = 0;
  for (int i = 0; i < count; ++i) {
    const RandomCase random(first + static_cast<uint32_t>(i));
    const PlanResult result = make_plan(random.request());
    BruteForce brute(random.request(), result.chosen.layout);
    const double best = brute.run();
    SCOPED_TRACE(concat("case ",
                        first + static_cast<uint32_t>(i),
                        "\nbest  ",
                        text(brute.layout()),
                        "\nfound ",
                        text(result.chosen.layout)));
    EXPECT_EQ(result.feasible, best < 1e300);
    if (!result.feasible) {
      ++equal;
      continue;
    }
    const double found = result.chosen.prediction.seconds;
    EXPECT_GE(found, best * (1 - 1e-9));
    EXPECT_LE(found, best * 1.01);
    EXPECT_LE(result.lower_bound, best * (1 + 1e-9));
    equal += found <= best * (1 + 1e-9) ? 1 : 0;
  }
  EXPECT_GE(equal, 0.95 * count);
  ::testing::Test::RecordProperty("equal", equal);
}

TEST(OptimalityTest, NoPlanIsFasterInTheFirstCases) {
  compare(0, 12);
}
TEST(OptimalityTest, NoPlanIsFasterInTheSecondCases) {
  compare(1000, 12);
}
TEST(OptimalityTest, NoPlanIsFasterInTheThirdCases) {
  compare(2000, 12);
}
// What fits only where tensors are cut for memory.
TEST(OptimalityTest, NoPlanIsMissedThatCutsTensorsForMemory) {
  compare(10155, 1);
}
// Three ranks share dims that three does not divide, whose largest parts are padded.
TEST(OptimalityTest, NoPlanIsFasterThatPadsUnevenParts) {
  compare(10264, 1);
}
TEST(LongOptimalityTest, NoPlanIsFaster) {
  compare(10000, 400);
}

}  // namespace
}  // namespace trainrt
