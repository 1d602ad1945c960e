// --trace of `run` and of `plan`: one form, the same cells.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt::testing {
namespace {

// Names of the events of a lane on each rank; every time is at least 0.
std::map<int, std::set<std::string>> names_of(const std::string& path, const std::string& lane) {
  std::map<int, std::set<std::string>> names;
  for (const nlohmann::json& event : nlohmann::json::parse(file_text(path))) {
    if (event.value("ph", "") == "X") {
      EXPECT_GE(event.at("ts").get<double>(), 0);
      EXPECT_GE(event.at("dur").get<double>(), 0);
      if (event.at("cat") == lane) {
        names[event.at("pid").get<int>()].insert(event.at("name").get<std::string>());
      }
    }
  }
  return names;
}

TEST(TraceTest, RunAndPlanDrawTheSameCells) {
  const TemporaryFolder folder;
  write_text(folder.file("model.onnx"), tiny_model());
  const std::vector<std::string> plan = {folder.file("model.onnx"),
                                         "--devices",
                                         "cpu:2",
                                         "--pp",
                                         "2",
                                         "--schedule",
                                         "1f1b",
                                         "--batch-size",
                                         "6",
                                         "--micro-batch-size",
                                         "2"};
  std::vector<std::string> run = {"run"}, predict = {"plan"};
  run.insert(run.end(), plan.begin(), plan.end());
  predict.insert(predict.end(), plan.begin(), plan.end());
  run.insert(run.end(), {"--steps", "2", "--trace", folder.file("run.json")});
  predict.insert(predict.end(), {"--trace", folder.file("plan.json")});
  const ProgramResult ran = run_trainrt(run);
  ASSERT_EQ(ran.exit_code, 0) << ran.err;
  const ProgramResult planned = run_trainrt(predict);
  ASSERT_EQ(planned.exit_code, 0) << planned.err;
  // Both say how each rank's step is spent, in the same words, and where the file is.
  for (const char* rank : {"rank 0", "rank 1"}) {
    EXPECT_NE(ran.out.find(rank + std::string(": compute ")), std::string::npos) << ran.out;
    EXPECT_NE(planned.err.find(rank + std::string(" (predicted): compute ")), std::string::npos)
        << planned.err;
  }
  EXPECT_NE(planned.err.find("wrote " + folder.file("plan.json")), std::string::npos);
  const auto measured = names_of(folder.file("run.json"), "compute");
  const auto predicted = names_of(folder.file("plan.json"), "compute");
  ASSERT_EQ(predicted.size(), 2u);
  for (const auto& [rank, cells] : predicted) {
    for (const std::string& cell : cells) {
      EXPECT_EQ(measured.at(rank).count(cell), 1u) << cell << " of rank " << rank;
    }
  }
  EXPECT_EQ(predicted.at(0).count("0B2"), 1u);
  // The second stage waits for the first one's activations.
  EXPECT_FALSE(names_of(folder.file("run.json"), "bubble").at(1).empty());
}

}  // namespace
}  // namespace trainrt::testing
