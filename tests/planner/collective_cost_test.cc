// Collective times against the measured all-reduces, and what must hold for any group.
#include "planner/collective_cost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "parallel/cluster_file.h"
#include "parallel/csv.h"
#include "tests/support/paths.h"

namespace trainrt {
namespace {

GroupLinks first_ranks(const Topology& topology, int count) {
  std::vector<int> devices;
  for (int i = 0; i < count; ++i) {
    devices.push_back(i);
  }
  return group_links(topology, devices, 1);
}

TEST(CollectiveCostTest, MeetsMeasuredAllReducesOfOneA100Host) {
  std::ifstream file(testing::source_path("tests/data/validation/collectives_measured.csv"));
  std::ostringstream text;
  text << file.rdbuf();
  const Topology topology = make_preset("dgx-a100");
  double error = 0;
  int rows = 0;
  for (CsvRow& row : parse_csv(text.str(), "collectives_measured.csv")) {
    if (row["system"].rfind("A100-SXM4", 0) != 0 || row["bytes"].empty()) {
      continue;
    }
    const double bytes = std::stod(row["bytes"]);
    const double seconds =
        collective_time(
            Collective::kAllReduce, bytes, first_ranks(topology, std::stoi(row["ranks"])), "ampere")
            .seconds;
    const double relative = seconds / (std::stod(row["time_us"]) * 1e-6) - 1;
    EXPECT_LT(std::fabs(relative), 0.6) << row["ranks"] << " ranks, " << bytes << " bytes";
    error += std::fabs(relative);
    ++rows;
  }
  ASSERT_GT(rows, 50);
  EXPECT_LT(error / rows, 0.17);
}

TEST(CollectiveCostTest, GrowsWithBytesAndWithHosts) {
  const Topology topology = make_preset("dgx-a100:16");
  for (const Collective kind :
       {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
    double before = 0;
    for (double bytes = 1024; bytes < 1e10; bytes *= 3) {
      const double seconds =
          collective_time(kind, bytes, first_ranks(topology, 32), "ampere").seconds;
      EXPECT_GE(seconds, before);
      before = seconds;
      EXPECT_GE(collective_time(kind, bytes, first_ranks(topology, 128), "ampere").seconds,
                seconds);
    }
  }
}

TEST(CollectiveCostTest, AllReduceCostsAtMostReduceScatterAndAllGather) {
  const Topology topology = make_preset("dgx-h100:2");
  const GroupLinks group = first_ranks(topology, 16);
  for (double bytes = 1e6; bytes < 1e10; bytes *= 10) {
    const auto seconds = [&](Collective kind) {
      return collective_time(kind, bytes, group, "hopper").seconds;
    };
    EXPECT_LE(seconds(Collective::kAllReduce),
              1.001 * (seconds(Collective::kReduceScatter) + seconds(Collective::kAllGather)));
  }
}

TEST(CollectiveCostTest, NothingToDoTakesNoTime) {
  const Topology topology = make_preset("dgx-a100");
  EXPECT_EQ(
      collective_time(Collective::kAllReduce, 1e9, first_ranks(topology, 1), "ampere").seconds, 0);
  EXPECT_EQ(collective_time(Collective::kAllReduce, 0, first_ranks(topology, 8), "ampere").seconds,
            0);
}

}  // namespace
}  // namespace trainrt
