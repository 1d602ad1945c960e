// One loss, whatever the plan, for every family of example models: a pairwise cover of degrees,
// schedules, recomputation, ZeRO, shares, reductions and BatchNorm forms in the gate, a random
// sample of the whole product in `long` (TRAINRT_PLAN_CASES of them from TRAINRT_PLAN_SEED on).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <random>
#include <string_view>

#include "tests/support/family_model.h"
#include "tests/support/pairwise.h"
#include "tests/support/plan_layout.h"
#include "tests/support/run_plan.h"

namespace trainrt::testing {
namespace {

constexpr int64_t kBatch = 13;
constexpr int64_t kMicroBatch = 2;  // seven of them, the last one short
// Its last maps are one pixel: BatchNorm over too few samples of it would magnify all rounding.
constexpr int64_t kMobileNetMicroBatch = 7;

const std::array<const char*, 10> kFamilies = {
    "mlp", "gpt2", "bert", "llama", "t5", "lstm", "vit", "cnn", "unet", "mobilenet"};

// ---- the space of plans ------------------------------------------------------------------------

std::vector<std::array<int, 3>> degrees() {
  std::vector<std::array<int, 3>> list;
  for (int dp = 1; dp <= 4; ++dp) {
    for (int tp = 1; tp <= 4; ++tp) {
      for (int pp = 1; pp <= 4; ++pp) {
        if (dp * tp * pp <= 8) {
          list.push_back({dp, tp, pp});
        }
      }
    }
  }
  return list;
}

enum Factor : uint8_t {
  kFamily,
  kDegrees,
  kSchedule,
  kRecompute,
  kZero,
  kShares,
  kReduction,
  kBatchNorm,
  kOffload,
  kSequence,
  kNumFactors,
};

const std::vector<int>& factor_sizes() {
  static const std::vector<int> sizes = {static_cast<int>(kFamilies.size()),
                                         static_cast<int>(degrees().size()),
                                         5,
                                         3,
                                         4,
                                         3,
                                         2,
                                         2,
                                         2,
                                         2};
  return sizes;
}

bool is_mobilenet(const std::vector<int>& row) {
  return kFamilies[static_cast<size_t>(row[kFamily])] == std::string_view("mobilenet");
}

Layout layout_of(const std::vector<int>& row) {
  const auto [dp, tp, pp] = degrees()[static_cast<size_t>(row[kDegrees])];
  Layout layout;
  layout.dp = dp;
  layout.tp = tp;
  layout.pp = pp;
  layout.micro_batch = is_mobilenet(row) ? kMobileNetMicroBatch : kMicroBatch;
  layout.schedule = static_cast<ScheduleKind>(row[kSchedule]);
  layout.v = layout.schedule == ScheduleKind::kInterleaved ? 2 : 1;
  layout.recompute = static_cast<RecomputeMode>(row[kRecompute]);
  layout.zero = row[kZero];
  // Even; falling, the last rank with a third of the first; one rank idle.
  for (int d = 0; d < dp && row[kShares] > 0; ++d) {
    layout.shares.push_back(row[kShares] == 1 ? 3.0 - 2.0 * d / dp : d == dp / 2 ? 0 : 1);
  }
  layout.exact = row[kReduction] == 1;
  layout.sync_batch_norm = row[kBatchNorm] == 1;
  layout.offload = row[kOffload] == 1;
  layout.sequence_parallel = row[kSequence] == 1;
  return layout;
}

// What does not exist is left out: interleaving and idle ranks want several ranks, 2BW at least as
// many micro-batches as stages on every data rank that has any. mobilenet, whose widths are fixed,
// takes its time and has two ranks at most; micro-batches within exact sums' shards are too small
// for its BatchNorm.
bool exists(const std::vector<int>& row) {
  const Layout layout = layout_of(row);
  if (is_mobilenet(row) &&
      (layout.dp * layout.tp * layout.pp > 2 || (layout.exact && layout.tp > 1))) {
    return false;
  }
  if ((layout.schedule == ScheduleKind::kInterleaved && layout.pp == 1) ||
      (layout.dp == 1 && row[kShares] > 0)) {
    return false;
  }
  if (layout.schedule == ScheduleKind::k2BW) {
    for (const DataShare& share : plan_of(layout, kBatch, 100).shares) {
      if (share.num_micro_batches > 0 && share.num_micro_batches < layout.pp) {
        return false;
      }
    }
  }
  return true;
}

// ---- one case ----------------------------------------------------------------------------------

class FamilyEquivalenceTest : public ::testing::Test {
 protected:
  static FamilyModel make_model(const ModelSpec& spec, bool clips = true) {
    OptimizerSpec optimizer;
    optimizer.name = "momentum";  // linear in the gradient
    optimizer.clip_norm = clips ? 0.5 : 0;
    FamilyModel model = family_model(spec, kBatch, "fp64", optimizer);
    model.name += clips ? "" : " without clipping";
    return model;
  }

  // For a plan: only without clipping the steps of 2BW go over into each other.
  static const FamilyModel& model(const std::string& family, const Layout& layout) {
    static std::map<std::pair<std::string, bool>, FamilyModel> models;
    const bool clips = layout.schedule != ScheduleKind::k2BW;
    const auto [at, is_new] = models.try_emplace({family, clips});
    if (is_new) {
      at->second = make_model(small_family(family), clips);
    }
    return at->second;
  }

  static PlanRun run(const FamilyModel& model, const Layout& layout) {
    RunOptions options;
    options.steps = 2;
    options.reference_kernels = false;
    return run_plan(model.factory, plan_of(layout, kBatch, model.num_nodes), model.feeds, options);
  }

  // The plan of `layout` on fewer devices that must give the same bits, or without its tensor ranks
  // the same numbers within rounding.
  static Layout reference_layout(const FamilyModel& model, const Layout& layout) {
    Layout reference;
    reference.micro_batch = layout.micro_batch;
    reference.exact = layout.exact;
    reference.schedule =
        layout.schedule == ScheduleKind::k2BW ? ScheduleKind::k2BW : ScheduleKind::k1F1B;
    const bool synced = model.has_batch_norm && layout.sync_batch_norm && layout.dp > 1;
    if (!layout.exact || synced) {
      reference.dp = layout.dp;
      reference.shares = layout.shares;
      reference.zero = layout.exact ? 0 : layout.zero;
    }
    reference.sync_batch_norm = synced;
    return reference;
  }

  static const PlanRun& reference_run(const FamilyModel& model, const Layout& layout) {
    static std::map<std::string, PlanRun> runs;
    const auto [at, is_new] = runs.try_emplace(model.name + " " + layout_string(layout));
    if (is_new) {
      at->second = run(model, layout);
    }
    return at->second;
  }

  static void check(const FamilyModel& tested, const Layout& layout) {
    const std::string what = tested.name + " " + layout_string(layout);
    SCOPED_TRACE(what);
    try {
      const PlanRun result = run(tested, layout);
      const Layout reference = reference_layout(tested, layout);
      const PlanRun& same_order = reference_run(tested, reference);
      if (layout.tp == 1) {
        expect_equal_bits(same_order, result, what);
      } else {
        expect_close(same_order, result, kTolerance, what);
      }
      if (reference.dp > 1 && !reference.sync_batch_norm) {
        Layout one = reference;
        one.dp = 1;
        one.shares.clear();
        one.zero = 0;
        expect_close(reference_run(tested, one), same_order, kTolerance, "data ranks of " + what);
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << what << ": " << error.what();
    }
  }

  static constexpr double kTolerance = 1e-9;
};

TEST_F(FamilyEquivalenceTest, PairwiseCoverOfPlansTrainsAsOneDevice) {
  for (const std::vector<int>& row : pairwise_cover(factor_sizes(), 1, exists)) {
    check(model(kFamilies[static_cast<size_t>(row[kFamily])], layout_of(row)), layout_of(row));
  }
}

// What is worth making again of five samples is not of three: data ranks that run both gather the
// same parameters nevertheless.
TEST_F(FamilyEquivalenceTest, MobileNetGathersAlikeForMicroBatchesOfAllSizes) {
  const Layout layout{.dp = 2, .micro_batch = 5, .zero = 3};
  check(model("mobilenet", layout), layout);
}

// GPT-2's vocabulary, and heads and widths that the degrees do not divide.
TEST_F(FamilyEquivalenceTest, OddSizesTrainAsOneDevice) {
  ModelSpec spec = small_family("gpt2");
  spec.hidden = 252;
  spec.heads = 7;
  spec.ffn = 1009;
  spec.vocab = 50257;
  spec.layers = 1;
  spec.seq = 3;
  FamilyModel odd = make_model(spec);
  odd.name = "gpt2 of odd sizes";
  check(odd, {.tp = 3, .micro_batch = 7});
}

using LongFamilyEquivalenceTest = FamilyEquivalenceTest;

TEST_F(LongFamilyEquivalenceTest, RandomPlansTrainAsOneDevice) {
  const auto number = [](const char* name, uint64_t fallback) {
    const char* text = std::getenv(name);
    return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
  };
  const uint64_t cases = number("TRAINRT_PLAN_CASES", 2000);
  const uint64_t seed = number("TRAINRT_PLAN_SEED", 1);
  for (uint64_t i = 0; i < cases; ++i) {
    std::mt19937_64 random(seed + i);
    std::vector<int> row;
    do {
      row.clear();
      for (const int size : factor_sizes()) {
        row.push_back(static_cast<int>(random() % static_cast<uint64_t>(size)));
      }
    } while (!exists(row));
    SCOPED_TRACE(::testing::Message() << "TRAINRT_PLAN_SEED=" << seed + i);
    check(model(kFamilies[static_cast<size_t>(row[kFamily])], layout_of(row)), layout_of(row));
  }
}

}  // namespace
}  // namespace trainrt::testing
