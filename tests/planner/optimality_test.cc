// The search against all plans of its space, on small random models and clusters: uneven layers,
// mixed devices, memory limits that bite. The brute force knows nothing of bounds, balanced cuts or
// shares by speed; it has in common with the search what a plan is and what predict_step() says.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "planner/candidates.h"
#include "planner/planner.h"
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
    const auto peak = static_cast<double>(make_plan(request_).chosen.prediction.peak_bytes());
    for (DeviceType& type : request_.topology.types) {
      type.memory_bytes = static_cast<int64_t>(peak * (0.3 + 0.1 * pick(0, 8)));
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
                           " recompute ",
                           static_cast<int>(layout.recompute),
                           " sp ",
                           layout.sequence_parallel,
                           " micro-batch ",
                           layout.micro_batch);
  const std::vector<std::pair<const char*, const std::vector<int>*>> lists = {
      {" cuts", &layout.first_block},
      {" counts", &layout.num_micro_batches},
      {" devices", &layout.devices}};
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
  explicit BruteForce(const PlanRequest& request) : request_(request) {}

  const Layout& layout() const { return best_layout_; }

  // Seconds of the fastest plan that fits; above 1e300 if there is none.
  double run() {
    const int devices = request_.topology.num_devices();
    for (int t = 1; t <= devices; ++t) {
      for (int p = 1; p <= devices; ++p) {
        if (devices % (t * p) == 0 && fits_host(t)) {
          degrees({devices / t / p, t, p});
        }
      }
    }
    return best_;
  }

 private:
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
    for (int64_t b = 1; b <= samples; ++b) {
      const bool power = (b & (b - 1)) == 0;
      for (const bool sequence_parallel : {false, true}) {
        if ((!power && b != samples) || (sequence_parallel && d.tensor == 1)) {
          continue;
        }
        const ModelBlocks model = model_blocks(request_.model.training(b), b);
        const CostModel cost(request_.topology.type_of(0), request_.precision);
        std::vector<int> group;
        for (int i = 0; i < d.tensor; ++i) {
          group.push_back(i);
        }
        const GroupLinks links = group_links(request_.topology, group, 1);
        const GraphProfile made =
            graph_profile({&model, &cost, &links, d.tensor, sequence_parallel, 2});
        if (d.tensor > 1 && made.placements.empty()) {
          continue;
        }
        engine_ = own_engine(request_.precision, made.optimizer_bytes);
        profile_ = &made.profile;
        for (const std::vector<int>& order :
             candidate_device_orders(request_.topology, d, PlanPins())) {
          layouts(d, order);
        }
      }
    }
  }

  void layouts(const Degrees& d, const std::vector<int>& order) {
    Layout layout;
    layout.data = d.data;
    layout.tensor = d.tensor;
    layout.pipeline = d.pipeline;
    layout.sequence_parallel = profile_->sequence_parallel;
    layout.micro_batch = profile_->micro_batch;
    layout.devices = order;
    for (const RecomputeMode recompute :
         {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
      layout.recompute = recompute;
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
    const int64_t b = layout->micro_batch;
    const auto total = static_cast<int>((request_.global_batch + b - 1) / b);
    layout->last_micro_batch =
        total == 1 && layout->data == 1 && request_.global_batch % b != 0
            ? static_cast<double>(request_.global_batch % b) / static_cast<double>(b)
            : 1;
    for_each_sum(total, layout->data, 0, [&](const std::vector<int>& counts) {
      layout->num_micro_batches = counts;
      StepRequest step;
      step.profile = profile_;
      step.topology = &request_.topology;
      step.engine = &engine_;
      step.precision = request_.precision;
      step.layout = layout;
      for (const StageMemory& stage : predict_memory(step)) {
        if (!stage.fits()) {
          return;
        }
      }
      const double seconds = predict_step(step).seconds;
      if (seconds < best_) {
        best_ = seconds;
        best_layout_ = *layout;
      }
    });
  }

  const PlanRequest& request_;
  const ModelProfile* profile_ = nullptr;
  Engine engine_;
  double best_ = 1e301;
  Layout best_layout_;
};

// Cases [first, first + count): how many of them the search solves to the last bit is counted.
void compare(uint32_t first, int count) {
  int equal = 0;
  for (int i = 0; i < count; ++i) {
    const RandomCase random(first + static_cast<uint32_t>(i));
    BruteForce brute(random.request());
    const double best = brute.run();
    const PlanResult result = make_plan(random.request());
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
  compare(0, 30);
}
TEST(OptimalityTest, NoPlanIsFasterInTheSecondCases) {
  compare(1000, 30);
}
TEST(OptimalityTest, NoPlanIsFasterInTheThirdCases) {
  compare(2000, 30);
}
TEST(LongOptimalityTest, NoPlanIsFaster) {
  compare(10000, 400);
}

}  // namespace
}  // namespace trainrt
