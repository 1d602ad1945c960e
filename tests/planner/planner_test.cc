// The search on a layered model: what it finds, what it respects, what it says when nothing fits.
#include "planner/planner.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "planner/shares.h"
#include "planner/stage_partition.h"
#include "tests/support/layered_model.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;

PlanRequest request_for(const Topology& topology, int64_t batch, int layers, int64_t hidden) {
  PlanRequest request;
  request.model.training = [layers, hidden](int64_t micro_batch) {
    return testing::layered_model(micro_batch, layers, 512, hidden, 4 * hidden, 1024);
  };
  request.topology = topology;
  request.global_batch = batch;
  request.precision = "bf16";
  return request;
}

TEST(BlockFinderTest, RepeatedLayersAreOneClass) {
  const TrainingGraph graph = testing::layered_model(2, 6, 16, 32, 64, 8);
  const BlockList list = find_blocks(graph.graph);
  int most = 0;
  std::map<int, int> count;
  size_t backward = 0;
  for (const Block& block : list.blocks) {
    most = std::max(most, ++count[block.block_class]);
    backward += block.backward.size();
  }
  EXPECT_GE(most, 5);  // the first layer reads the input, which has no gradient
  // More layers, no more classes.
  EXPECT_EQ(list.num_classes,
            find_blocks(testing::layered_model(2, 12, 16, 32, 64, 8).graph).num_classes);
  size_t expected = 0;
  for (const Node& node : graph.graph.nodes()) {
    expected += node.region == Region::kBackward ? 1 : 0;
  }
  EXPECT_EQ(backward, expected);
}

// Column then row: the first product split by its outputs, the second by its inputs, one all-reduce
// forward and one backward. Nobody told the search.
TEST(ShardingSearchTest, FindsTheColumnRowPair) {
  const TrainingGraph graph = testing::layered_model(4, 4, 1024, 4096, 16384, 1024);
  const ModelBlocks model = model_blocks(graph, 4);
  const Topology topology = make_preset("dgx-a100");
  const CostModel cost(topology.type_of(0), "bf16");
  const GroupLinks group = group_links(topology, {0, 1, 2, 3}, 1);
  GraphProfileRequest request{&model, &cost, &group, 4, false, 2};
  const GraphProfile profile = graph_profile(request);
  EXPECT_EQ(profile.placements.at("layer1.up"), Placement::shard(1));
  EXPECT_EQ(profile.placements.at("layer1.down"), Placement::shard(0));
  bool found = false;
  for (const BlockClass& block : profile.profile.classes) {
    if (block.parameters == 2.0 * 4096 * 16384 / 4) {
      EXPECT_EQ(block.forward.collectives.size(), 1u);
      EXPECT_EQ(block.forward.collectives[0].kind, Collective::kAllReduce);
      found = true;
    }
  }
  EXPECT_TRUE(found);
}

TEST(PlannerTest, UsesAllDevicesAndAddsUp) {
  const PlanRequest request = request_for(make_preset("dgx-a100:2"), 64, 8, 2048);
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  EXPECT_EQ(result.plan.world_size(), 16);
  EXPECT_EQ(result.plan.devices.size(), 16u);
  int64_t samples = 0;
  for (const DataShare& share : result.plan.shares) {
    samples += share.num_samples;
  }
  EXPECT_EQ(samples, 64);
  EXPECT_LE(result.lower_bound, result.chosen.prediction.seconds * (1 + 1e-12));
  EXPECT_EQ(result.plan.stages.front().first_node, 0);
  EXPECT_EQ(result.plan.stages.back().last_node, 8 * 4);
  EXPECT_EQ(plan_to_json(plan_from_json(plan_to_json(result.plan))), plan_to_json(result.plan));
  for (const Candidate& other : result.alternatives) {
    EXPECT_FALSE(other.rejected_because.empty());
  }
}

TEST(PlannerTest, PinsAreRespected) {
  PlanRequest request = request_for(make_preset("dgx-a100"), 32, 8, 1024);
  request.pins.tensor = 2;
  request.pins.pipeline = 2;
  request.pins.schedule = ScheduleKind::kGPipe;
  request.pins.recompute = RecomputeMode::kFull;
  request.pins.micro_batch = 4;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  EXPECT_EQ(result.plan.tensor_parallel, 2);
  EXPECT_EQ(result.plan.pipeline_parallel, 2);
  EXPECT_EQ(result.plan.data_parallel, 2);
  EXPECT_EQ(result.plan.schedule, ScheduleKind::kGPipe);
  EXPECT_EQ(result.plan.stages[0].recompute, RecomputeMode::kFull);
  EXPECT_EQ(result.plan.micro_batch_size, 4);
}

TEST(PlannerTest, NoPinnedMicroBatchIsFasterThanTheFreeSearch) {
  for (const auto& [cluster, batch, layers] :
       {std::tuple("rtx-4090", 512, 2), std::tuple("rtx-4090:3", 64, 4)}) {
    PlanRequest request = request_for(make_preset(cluster), batch, layers, 256);
    const double free = make_plan(request).chosen.prediction.seconds;
    for (const int64_t size : {4, 16, 22, 64, 200, 512}) {
      request.pins.micro_batch = size;
      const PlanResult pinned = make_plan(request);
      EXPECT_LE(free, 1.01 * pinned.chosen.prediction.seconds) << cluster << ", " << size;
    }
  }
}

TEST(PlannerTest, MicroBatchesWithoutNumberAreRefused) {
  PlanRequest request = request_for(make_preset("rtx-4090"), 1, 2, 256);
  request.global_batch = 99'999'999'999;
  EXPECT_FALSE(make_plan(request).feasible);  // no device holds the fewest that a step may have
  PlanRequest mixed = request;                // whose data ranks could have sizes of their own
  mixed.topology = parse_cluster(
      "hosts: [{count: 1, devices: [{count: 1, type: rtx-4090}, {count: 1, type: a100-sxm4-80gb}],"
      " intra: pcie4}]",
      "c.yaml");
  EXPECT_FALSE(make_plan(mixed).feasible);
  request.pins.micro_batch = 16;
  try {
    make_plan(request);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("more than 65536 of them a step"));
  }
}

TEST(PlannerTest, ContradictingPinsAreRefused) {
  PlanRequest request = request_for(make_preset("dgx-a100"), 32, 4, 256);
  request.pins.tensor = 4;
  request.pins.pipeline = 4;
  EXPECT_THROW(make_plan(request), Error);
  request.pins = {};
  request.pins.virtual_stages = 2;
  request.pins.schedule = ScheduleKind::kGPipe;
  EXPECT_THROW(make_plan(request), Error);
  request.pins = {};
  request.pins.data = 64;
  EXPECT_THROW(make_plan(request), Error);
}

TEST(PlannerTest, SaysHowManyBytesAreMissingAndWhatWouldHelp) {
  PlanRequest request = request_for(make_preset("t4"), 8, 16, 8192);
  request.precision = "fp16";
  const PlanResult result = make_plan(request);
  ASSERT_FALSE(result.feasible);
  EXPECT_GT(result.missing_bytes, 0);
  EXPECT_FALSE(result.remedies.empty());
}

// More data ranks than samples: some idle.
TEST(PlannerTest, RanksWithoutASampleAreAllowedWhereAskedFor) {
  PlanRequest request = request_for(make_preset("cpu:3"), 2, 2, 64);
  request.precision = "fp32";
  request.pins.data = 3;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  ASSERT_EQ(result.plan.shares.size(), 3u);
  std::vector<int64_t> samples;
  for (const DataShare& share : result.plan.shares) {
    samples.push_back(share.num_samples);
  }
  std::sort(samples.begin(), samples.end());
  EXPECT_EQ(samples, (std::vector<int64_t>{0, 1, 1}));
}

// Splitting so small a model does not pay, but what is pinned is done.
TEST(PlannerTest, APinnedTensorDegreeIsKeptWhereItDoesNotPay) {
  PlanRequest request = request_for(make_preset("cpu:2"), 4, 2, 64);
  request.precision = "fp32";
  request.pins.tensor = 2;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  EXPECT_EQ(result.plan.tensor_parallel, 2);
  EXPECT_FALSE(result.plan.placements.empty());
}

TEST(PlannerTest, TensorDegreesThatDivideNoDimAreCarriedOut) {
  for (const int degree : {2, 3}) {
    PlanRequest request = request_for(make_preset(concat("cpu:", degree)), 6, 2, 64);
    request.model.training = [](int64_t micro_batch) {
      return testing::layered_model(micro_batch, 1, 3, 5, 7, 11);
    };
    request.precision = "fp32";
    request.pins.tensor = degree;
    const PlanResult result = make_plan(request);
    ASSERT_TRUE(result.feasible) << degree;
    EXPECT_FALSE(result.plan.placements.empty()) << degree;
  }
}

TEST(PlannerTest, ATensorDegreeThatNothingHasPartsForIsRefused) {
  PlanRequest request = request_for(make_preset("cpu:16"), 6, 2, 64);
  request.model.training = [](int64_t micro_batch) {
    return testing::layered_model(micro_batch, 1, 3, 5, 7, 11);
  };
  request.precision = "fp32";
  const auto refusal = [&]() -> std::string {
    try {
      make_plan(request);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  request.pins.tensor = 16;
  EXPECT_THAT(refusal(),
              HasSubstr("--tp 16 has no tensor to share: no dim of a weight has a part "
                        "for more than 11 ranks; lower --tp to 11 or less"));
  request.pins.tensor.reset();
  request.pins.data = 1;
  request.pins.pipeline = 1;
  EXPECT_THAT(refusal(), HasSubstr("a tensor degree of 16, which the pins leave, has no tensor"));
}

// As an even size just above it is.
TEST(ShardingSearchTest, AnOddSizeIsCutAsAnEvenOne) {
  const Topology topology = make_preset("dgx-a100");
  const CostModel cost(topology.type_of(0), "bf16");
  const GroupLinks group = group_links(topology, {0, 1}, 1);
  const auto profile = [&](int64_t ffn) {
    const ModelBlocks model = model_blocks(testing::layered_model(4, 4, 1024, 4096, ffn, 1024), 4);
    return graph_profile({&model, &cost, &group, 2, false, 2});
  };
  const GraphProfile odd = profile(16383), even = profile(16384);
  EXPECT_EQ(odd.placements, even.placements);
  EXPECT_EQ(odd.placements.at("layer1.up"), Placement::shard(1));
  // The first rank has as much as of the even size.
  for (size_t c = 0; c < odd.profile.classes.size(); ++c) {
    EXPECT_EQ(odd.profile.classes[c].parameters, even.profile.classes[c].parameters);
  }
}

// The other two degrees leave it no choice.
TEST(PlannerTest, ATensorDegreeThatOtherPinsImplyIsCarriedOut) {
  PlanRequest request = request_for(make_preset("cpu:8"), 4, 8, 64);
  request.precision = "fp32";
  request.pins.data = 2;
  request.pins.pipeline = 2;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  EXPECT_EQ(result.plan.tensor_parallel, 2);
}

// A card at half speed gets about half the samples of a full one.
TEST(PlannerTest, SharesFollowTheSpeed) {
  const Topology topology = parse_cluster(
      "hosts: [{devices: [{count: 1, type: rtx-4090, speed: 0.5}, {count: 2, type: rtx-4090}]}]",
      "c.yaml");
  PlanRequest request = request_for(topology, 40, 4, 1024);
  request.pins.data = 3;
  request.pins.micro_batch = 1;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  ASSERT_EQ(result.plan.shares.size(), 3u);
  for (const DataShare& share : result.plan.shares) {
    const std::string& device = result.plan.devices[static_cast<size_t>(share.data_rank)].device;
    EXPECT_EQ(share.num_samples, device == "cuda:0" ? 8 : 16) << device;
  }
}

TEST(PlannerTest, NoGivenSharesAreFasterThanTheFreeSearch) {
  const Topology topology = parse_cluster(
      "hosts: [{devices: [{count: 2, type: a100-80gb-sxm}]}, {devices: [{count: 2, type: t4}]}]",
      "c.yaml");
  for (const int64_t batch : {24, 100}) {
    PlanRequest request = request_for(topology, batch, 4, 256);
    request.precision = "fp16";
    const double free = make_plan(request).chosen.prediction.seconds;
    for (const double more : {1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0, 11.0}) {
      request.pins.shares = {more, more, 1, 1};
      EXPECT_LE(free, 1.02 * make_plan(request).chosen.prediction.seconds) << batch << ", " << more;
    }
  }
}

TEST(PlannerTest, WhatCannotBeCompiledIsTold) {
  PlanRequest request = request_for(make_preset("rtx-4090:2"), 8, 2, 256);
  request.device_spec = [](const Topology&, int) { return DeviceSpec{}; };
  request.programs = [](int64_t, bool) -> TrainingGraph {
    TRAINRT_FAIL(kUnsupported, "node 'n' has no kernel");
  };
  try {
    make_plan(request);
    FAIL() << "a plan that cannot be compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("can be carried out"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("node 'n' has no kernel"));
  }
}

// As many as the smallest part of the cluster on which there is a plan.
TEST(PlannerTest, TheFewestDevicesAreFound) {
  constexpr int kLayers = 26;
  PlanRequest request = request_for(make_preset("rtx-4090:8"), 16, kLayers, 4096);
  request.objective = Objective::kDevices;
  const PlanResult result = make_plan(request);
  ASSERT_TRUE(result.feasible);
  int fewest = 1;
  while (!make_plan(request_for(make_preset(concat("rtx-4090:", fewest)), 16, kLayers, 4096))
              .feasible) {
    ++fewest;
  }
  EXPECT_EQ(result.plan.world_size(), fewest);
  EXPECT_EQ(fewest, 3);  // no divisor of 8
}

TEST(PlannerTest, NoPinnedPlanTakesLessMemoryThanTheSearchForTheLeast) {
  PlanRequest request = request_for(make_preset("dgx-a100:1"), 64, 4, 1024);
  request.objective = Objective::kMemory;
  const int64_t least = make_plan(request).chosen.prediction.peak_bytes();
  for (const auto& [data, tensor, pipeline] :
       {std::tuple(1, 8, 1), std::tuple(8, 1, 1), std::tuple(1, 4, 2), std::tuple(2, 1, 4)}) {
    request.pins.data = data;
    request.pins.tensor = tensor;
    request.pins.pipeline = pipeline;
    EXPECT_LE(least, make_plan(request).chosen.prediction.peak_bytes()) << data << ", " << tensor;
  }
}

// Two hosts with a slow link between them: the report says that one alone is faster, and it is.
TEST(PlannerTest, FewerDevicesThatAreFasterAreTold) {
  Topology topology = parse_cluster("hosts: [{devices: [{count: 4, type: rtx-4090}]}]", "c.yaml");
  PlanRequest alone = request_for(topology, 16, 4, 1024);
  const double seconds = make_plan(alone).chosen.prediction.seconds;
  topology.add_host({0, 0, 0, 0}, topology.hosts[0].intra, find_link("ethernet-1g"), 1);
  topology.hosts[0].inter = find_link("ethernet-1g");
  PlanRequest request = request_for(topology, 16, 4, 1024);
  request.what_if_candidates = 1;  // the other questions are not asked
  const PlanResult result = make_plan(request);
  ASSERT_GT(result.chosen.prediction.seconds, 1.1 * seconds);
  ASSERT_EQ(result.what_if.size(), 1u);
  EXPECT_THAT(result.what_if[0].change, ::testing::HasSubstr("4 of the 8 devices"));
  EXPECT_NEAR(result.what_if[0].seconds, seconds, 1e-6 * seconds);
  EXPECT_GT(result.what_if[0].rate_change, 0.1);
}

// Greedy against all ways to spread a few micro-batches.
TEST(SharesTest, AreOptimal) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> time(0.2, 3);
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + static_cast<int>(random() % 4), total = static_cast<int>(random() % 9);
    std::vector<double> seconds;
    for (int i = 0; i < n; ++i) {
      seconds.push_back(time(random));
    }
    std::vector<int> counts(static_cast<size_t>(n), 0);
    double best = 1e300;
    const std::function<void(int, int)> all = [&](int at, int left) {
      if (at == n - 1) {
        counts[static_cast<size_t>(at)] = left;
        double worst = 0;
        for (int i = 0; i < n; ++i) {
          worst = std::max(worst, counts[static_cast<size_t>(i)] * seconds[static_cast<size_t>(i)]);
        }
        best = std::min(best, worst);
        return;
      }
      for (int k = 0; k <= left; ++k) {
        counts[static_cast<size_t>(at)] = k;
        all(at + 1, left - k);
      }
    };
    all(0, total);
    const std::vector<int> spread = spread_micro_batches(total, seconds, {});
    double worst = 0;
    int sum = 0;
    for (int i = 0; i < n; ++i) {
      worst = std::max(worst, spread[static_cast<size_t>(i)] * seconds[static_cast<size_t>(i)]);
      sum += spread[static_cast<size_t>(i)];
    }
    EXPECT_EQ(sum, total);
    EXPECT_NEAR(worst, best, 1e-9);
  }
}

// Greedy against all ways to hold a few samples.
TEST(SharesTest, OfSizesOfTheirOwnAreOptimal) {
  std::mt19937 random(6);
  std::uniform_real_distribution<double> time(0.2, 3);
  for (int round = 0; round < 300; ++round) {
    const size_t n = 1 + random() % 3;
    const int64_t samples = 1 + static_cast<int64_t>(random() % 12);
    std::vector<double> seconds;
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < n; ++i) {
      seconds.push_back(time(random));
      sizes.push_back(int64_t{1} << random() % 4);
    }
    double best = 1e300;
    const std::function<void(size_t, int64_t, double)> all =
        [&](size_t at, int64_t held, double longest) {
          if (at == n) {
            best = held >= samples ? std::min(best, longest) : best;
            return;
          }
          for (int k = 0; k <= samples; ++k) {
            all(at + 1, held + k * sizes[at], std::max(longest, k * seconds[at]));
          }
        };
    all(0, 0, 0);
    const std::vector<int> counts = cover_samples(samples, seconds, sizes, {});
    double longest = 0;
    for (size_t i = 0; i < n; ++i) {
      longest = std::max(longest, counts[i] * seconds[i]);
    }
    EXPECT_NEAR(longest, best, 1e-9);
    const std::vector<int64_t> own = samples_of(samples, counts, sizes);
    ASSERT_EQ(own.size(), n);
    int64_t sum = 0;
    for (size_t i = 0; i < n; ++i) {
      sum += own[i];
      EXPECT_EQ((own[i] + sizes[i] - 1) / sizes[i], counts[i]);
    }
    EXPECT_EQ(sum, samples);
  }
}

// Against all sizes.
TEST(SharesTest, PacedSizesAreOptimal) {
  std::mt19937 random(8);
  std::uniform_real_distribution<double> time(0.2, 3);
  for (int round = 0; round < 300; ++round) {
    const size_t n = 2 + random() % 2;
    const int each = 1 + static_cast<int>(random() % 3);
    std::vector<int> kinds;
    for (size_t kind = 0; kind < n; ++kind) {
      kinds.insert(kinds.end(), 1 + random() % 3, static_cast<int>(kind));
    }
    const auto samples =
        each * static_cast<int64_t>(kinds.size()) + static_cast<int64_t>(random() % 20);
    std::vector<std::map<int64_t, double>> seconds(n);
    for (auto& points : seconds) {
      double sum = time(random);
      for (int64_t size = 1; size <= samples; ++size) {
        points[size] = sum += time(random);
      }
    }
    double best = 1e300;
    const std::function<void(size_t, int64_t, double)> all =
        [&](size_t kind, int64_t held, double longest) {
          if (kind == n) {
            best = each * held >= samples ? std::min(best, longest) : best;
            return;
          }
          const int64_t ranks = std::count(kinds.begin(), kinds.end(), static_cast<int>(kind));
          for (const auto& [size, own] : seconds[kind]) {
            all(kind + 1, held + ranks * size, std::max(longest, own));
          }
        };
    all(0, 0, 0);
    const PacedSizes paced = paced_sizes(samples, each, seconds, kinds);
    int64_t held = 0;
    double longest = 0;
    for (const int kind : kinds) {
      const auto i = static_cast<size_t>(kind);
      held += each * paced.sizes[i];
      longest = std::max(longest, seconds[i].at(paced.sizes[i]));
    }
    EXPECT_GE(held, samples);
    EXPECT_DOUBLE_EQ(longest, best);
    EXPECT_NEAR(paced.seconds, best, 1e-9);
  }
}

TEST(StagePartitionTest, CutsAreOptimal) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> time(0.1, 2);
  for (int round = 0; round < 300; ++round) {
    const int blocks = 2 + static_cast<int>(random() % 8);
    const int stages = 1 + static_cast<int>(random() % static_cast<unsigned>(std::min(4, blocks)));
    std::vector<std::vector<double>> seconds(static_cast<size_t>(stages));
    std::vector<double> base;
    for (int b = 0; b < blocks; ++b) {
      base.push_back(time(random));
    }
    for (auto& stage : seconds) {
      const double speed = round % 2 == 0 ? 1 : time(random);
      for (const double own : base) {
        stage.push_back(own / speed);
      }
    }
    const auto largest = [&](const std::vector<int>& first) {
      double worst = 0;
      for (int s = 0; s < stages; ++s) {
        const int end = s + 1 < stages ? first[static_cast<size_t>(s) + 1] : blocks;
        double sum = 0;
        for (int b = first[static_cast<size_t>(s)]; b < end; ++b) {
          sum += seconds[static_cast<size_t>(s)][static_cast<size_t>(b)];
        }
        worst = std::max(worst, sum);
      }
      return worst;
    };
    double best = 1e300;
    std::vector<int> first(static_cast<size_t>(stages), 0);
    const std::function<void(int)> all = [&](int s) {
      if (s == stages) {
        best = std::min(best, largest(first));
        return;
      }
      for (int b = first[static_cast<size_t>(s) - 1] + 1; b <= blocks - (stages - s); ++b) {
        first[static_cast<size_t>(s)] = b;
        all(s + 1);
      }
    };
    all(1);
    EXPECT_NEAR(largest(balanced_cuts(seconds)), best, 1e-9) << "round " << round;
  }
}

}  // namespace
}  // namespace trainrt
