// Loops on several threads: every piece once, a worker's pieces one after the other, and plans that
// do not depend on the number of threads.
#include "planner/parallel_for.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "parallel/made_once.h"
#include "planner/plan_report.h"
#include "planner/planner.h"
#include "tests/support/layered_model.h"

namespace trainrt {
namespace {

TEST(ParallelForTest, DoesEachPieceOnceWithAWorkerOfItsOwn) {
  const WorkerLimit limit(4);
  ASSERT_EQ(most_workers(), 4u);
  std::vector<int> done(1000, 0);
  std::vector<std::atomic<int>> at_work(4);
  std::atomic<int> clashes = 0;
  parallel_for(done.size(), [&](size_t i, size_t worker) {
    clashes += at_work.at(worker)++ == 0 ? 0 : 1;
    ++done[i];
    --at_work[worker];
  });
  EXPECT_EQ(done, std::vector<int>(1000, 1));
  EXPECT_EQ(clashes, 0);
  parallel_for(0, [](size_t, size_t) { FAIL() << "there is no piece"; });
}

TEST(ParallelForTest, LoopsMayBeNested) {
  const WorkerLimit limit(3);
  std::vector<int64_t> sums(20, 0);
  parallel_for(sums.size(), [&](size_t i, size_t) {
    std::vector<int64_t> parts(50, 0);
    parallel_for(parts.size(), [&](size_t j, size_t) { parts[j] = static_cast<int64_t>(i * j); });
    sums[i] = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(sums[i], static_cast<int64_t>(i) * 1225);
  }
}

TEST(ParallelForTest, ThrowsWhatTheLowestPieceThrew) {
  for (const size_t most : {1, 2, 4}) {
    const WorkerLimit limit(most);
    try {
      parallel_for(100, [](size_t i, size_t) {
        if (i % 7 == 3) {
          TRAINRT_FAIL(kInternal, "piece ", i);
        }
      });
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.message(), "piece 3");
    }
  }
}

TEST(MadeOnceTest, MakesAValueOnceWhoeverAsks) {
  const WorkerLimit limit(4);
  MadeOnce<int, std::string> values;
  std::atomic<int> made = 0;
  parallel_for(200, [&](size_t i, size_t) {
    const int key = static_cast<int>(i % 5);
    const std::string& value = values.at(key, [&] {
      ++made;
      return std::to_string(key);
    });
    EXPECT_EQ(value, std::to_string(key));
  });
  EXPECT_EQ(made, 5);
}

// What the report says of a plan, but for the time that the search took.
std::string report_with(size_t workers, const Topology& topology, int64_t batch, int layers) {
  const WorkerLimit limit(workers);
  PlanRequest request;
  request.model.training = [layers](int64_t micro_batch) {
    return testing::layered_model(micro_batch, layers, 128, 512, 2048, 256);
  };
  request.topology = topology;
  request.global_batch = batch;
  request.precision = "fp16";
  request.what_if_candidates = 1'000'000;
  const PlanResult result = make_plan(request);
  return report_json(request, result, ReportContext{"layers.onnx", 0});
}

TEST(PlannerTest, FindsTheSameOnAnyNumberOfThreads) {
  const Topology mixed = parse_cluster(
      "hosts: [{devices: [{count: 2, type: a100-80gb-sxm}]},"
      " {devices: [{count: 2, type: v100-32gb-sxm}]}]",
      "c.yaml");
  for (const Topology& topology : {make_preset("dgx-a100"), mixed}) {
    const std::string alone = report_with(1, topology, 22, 6);
    EXPECT_EQ(report_with(2, topology, 22, 6), alone);
    EXPECT_EQ(report_with(5, topology, 22, 6), alone);
  }
}

}  // namespace
}  // namespace trainrt
