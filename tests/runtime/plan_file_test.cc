// `plan --plan FILE`: everything that the file says holds, what it leaves out is planned, and what
// contradicts something is refused with both figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class PlanFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write_model("gpt2 --layers 3 --hidden 32 --heads 4 --seq 16 --vocab 64", model());
  }

  std::string model() const { return folder_.file("m.onnx"); }

  ProgramResult plan(const std::vector<std::string>& flags) const {
    std::vector<std::string> all = {"plan", model(), "--format", "json"};
    all.insert(all.end(), flags.begin(), flags.end());
    return run_trainrt(all);
  }

  ProgramResult plan_with(const Json& file, std::vector<std::string> flags) const {
    write_text(folder_.file("plan.json"), file.dump());
    flags.insert(flags.end(), {"--plan", folder_.file("plan.json")});
    return plan(flags);
  }

  Json found(const std::vector<std::string>& flags) const {
    const ProgramResult result = plan(flags);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Json::parse(result.out)["plan"];
  }

  Json followed(const Json& file, const std::vector<std::string>& flags) const {
    const ProgramResult result = plan_with(file, flags);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code == 0 ? Json::parse(result.out)["plan"] : Json();
  }

  void expect_refused(const Json& file,
                      const std::vector<std::string>& flags,
                      const ::testing::Matcher<std::string>& message) const {
    const ProgramResult result = plan_with(file, flags);
    EXPECT_EQ(result.exit_code, 2) << result.err << result.out;
    EXPECT_THAT(result.err, message);
    std::vector<std::string> command = {
        "run", model(), "--steps", "1", "--plan", folder_.file("plan.json")};
    command.insert(command.end(), flags.begin(), flags.end());
    const ProgramResult run = run_trainrt(command);
    EXPECT_EQ(run.exit_code, 2) << "run takes what plan refuses: " << result.err << run.err;
  }

  TemporaryFolder folder_;
};

// Nothing of this plan is what a search would choose: cuts off the layers' borders, an odd split of
// the batch, recomputation on one stage, devices in reverse, a weight held whole.
TEST_F(PlanFileTest, WholeFileHolds) {
  Json file = found({"--devices",
                     "cpu:8",
                     "--dp",
                     "2",
                     "--tp",
                     "2",
                     "--pp",
                     "2",
                     "--batch-size",
                     "6",
                     "--micro-batch-size",
                     "2"});
  const int last = file["stages"][1]["nodes"][1];
  file["stages"][0]["nodes"] = {0, 11};
  file["stages"][1]["nodes"] = {12, last};
  file["stages"][0]["recompute"] = {{"mode", "full"}, {"nodes", Json::array()}};
  file["shares"] = {{{"data_rank", 0}, {"num_samples", 5}, {"micro_batch_size", 2}},
                    {{"data_rank", 1}, {"num_samples", 1}, {"micro_batch_size", 1}}};
  for (int rank = 0; rank < 8; ++rank) {
    file["devices"][static_cast<size_t>(rank)]["device"] = "cpu:" + std::to_string(7 - rank);
  }
  ASSERT_FALSE(file["placements"].empty());
  const std::string tensor = file["placements"].begin().key();
  file["placements"][tensor] = {{"data", "replicate"}, {"tensor", "replicate"}};
  const Json plan = followed(file, {"--devices", "cpu:8"});
  for (const char* key : {"global_batch",
                          "micro_batch_size",
                          "data_parallel",
                          "tensor_parallel",
                          "pipeline_parallel",
                          "virtual_stages",
                          "schedule",
                          "zero_stage",
                          "sequence_parallel",
                          "stages",
                          "devices",
                          "placements",
                          "precision"}) {
    EXPECT_EQ(plan[key], file[key]) << key;
  }
  EXPECT_EQ(plan["shares"][0]["num_samples"], 5);
  EXPECT_EQ(plan["shares"][0]["num_micro_batches"], 3);
  EXPECT_EQ(plan["shares"][1]["num_samples"], 1);
  EXPECT_EQ(plan["shares"][1]["micro_batch_size"], 1);
}

TEST_F(PlanFileTest, PaddingHolds) {
  const Json plan = followed({{"padding", {{"MatMul", 48}}}}, {"--devices", "cpu"});
  EXPECT_EQ(plan["padding"], Json({{"MatMul", 48}}));
  // Products are padded where that pays: the head of 50,257 words, on matrix units.
  write_model("gpt2 --layers 2 --hidden 4096 --heads 32 --seq 128", model());
  EXPECT_FALSE(
      found({"--cluster", "dgx-a100", "--tp", "2", "--batch-size", "32"})["padding"].empty());
}

TEST_F(PlanFileTest, WhatItLeavesOutIsPlanned) {
  const Json plan = followed({{"pipeline_parallel", 2}, {"schedule", "gpipe"}},
                             {"--devices", "cpu:4", "--batch-size", "8"});
  EXPECT_EQ(plan["pipeline_parallel"], 2);
  EXPECT_EQ(plan["schedule"], "gpipe");
  EXPECT_EQ(plan["data_parallel"].get<int>() * plan["tensor_parallel"].get<int>(), 2);
  EXPECT_EQ(plan["stages"].size(), 2u);
  EXPECT_EQ(plan["global_batch"], 8);
}

// Degrees follow from the lists, though nobody states them.
TEST_F(PlanFileTest, ListsImplyDegrees) {
  const Json plan = followed({{"stages",
                               {{{"virtual_stage", 0}, {"rank_stage", 0}, {"nodes", {0, 9}}},
                                {{"virtual_stage", 1}, {"rank_stage", 1}, {"nodes", {10, 20}}}}},
                              {"shares",
                               {{{"data_rank", 0}, {"num_samples", 1}, {"micro_batch_size", 1}},
                                {{"data_rank", 1}, {"num_samples", 3}, {"micro_batch_size", 1}}}}},
                             {"--devices", "cpu:4", "--batch-size", "4"});
  EXPECT_EQ(plan["pipeline_parallel"], 2);
  EXPECT_EQ(plan["data_parallel"], 2);
  EXPECT_EQ(plan["stages"][1]["nodes"], Json({10, 20}));
  EXPECT_EQ(plan["shares"][1]["num_samples"], 3);
}

TEST_F(PlanFileTest, ContradictionsAreRefused) {
  const Json two = found({"--devices", "cpu:2", "--pp", "2", "--batch-size", "4"});
  const std::vector<std::string> on_two = {"--devices", "cpu:2"};
  const auto changed = [&](const char* pointer, const Json& value) {
    Json file = two;
    file[Json::json_pointer(pointer)] = value;
    return file;
  };
  expect_refused(two,
                 {"--devices", "cpu:2", "--pp", "1"},
                 AllOf(HasSubstr("--pp 1 contradicts"), HasSubstr("pipeline_parallel is 2")));
  expect_refused(two,
                 {"--devices", "cpu:2", "--batch-size", "9"},
                 AllOf(HasSubstr("--batch-size 9"), HasSubstr("4")));
  expect_refused(two, {"--devices", "cpu:2", "--precision", "bf16"}, HasSubstr("fp32"));
  expect_refused(two, {"--devices", "cpu:2", "--shares", "1"}, HasSubstr("--shares"));
  expect_refused(two, {"--devices", "cpu"}, HasSubstr("1 more than the cluster has"));
  expect_refused(changed("/model_hash", "0123"), on_two, HasSubstr("another model"));
  expect_refused(changed("/global_batch", 7), on_two, HasSubstr("3 fewer than the global batch"));
  expect_refused(changed("/stages/1/nodes", {14, 20}), on_two, HasSubstr("lie in"));
  expect_refused(changed("/stages/1/nodes/1", 900), on_two, HasSubstr("too many"));
  // A run takes its own devices, whatever the file calls them.
  EXPECT_THAT(plan_with(changed("/devices/1/device", "cpu:7"), on_two).err,
              HasSubstr("does not have"));
  expect_refused(changed("/devices/1/device", "cpu:0"), on_two, HasSubstr("are both on"));
  expect_refused(changed("/devices/1/rank", 0), on_two, HasSubstr("rank 0 twice"));
  expect_refused(changed("/devices/1/rank", 2), on_two, HasSubstr("wanted the ranks 0 to 1"));
  expect_refused(changed("/data_parallel", 2), on_two, HasSubstr("are for 1 data ranks"));
  expect_refused(changed("/placements", {{"wte.weigth", {{"tensor", "shard(0)"}}}}),
                 {"--devices", "cpu:2"},
                 HasSubstr("1 rank"));
  expect_refused({{"tensor_parallel", 2}, {"placements", {{"nothing", {{"tensor", "shard(0)"}}}}}},
                 on_two,
                 HasSubstr("the model does not have"));
  expect_refused({{"padding", {{"nothing", 8}}}}, on_two, HasSubstr("the model does not have"));
  expect_refused({{"padding", {{"trainrt.loss/cross_entropy/grad/SoftmaxCrossEntropyGrad", 8}}}},
                 on_two,
                 HasSubstr("cannot be padded"));
  for (const int64_t multiple : {int64_t{0}, int64_t{1000003}, INT64_MAX}) {
    expect_refused({{"padding", {{"MatMul", multiple}}}}, on_two, HasSubstr("from 1 to 1024"));
  }
  expect_refused({{"micro_batch_size", 2},
                  {"shares", {{{"data_rank", 0}, {"num_samples", 4}, {"micro_batch_size", 4}}}}},
                 {"--devices", "cpu", "--batch-size", "4"},
                 HasSubstr("has 4 samples"));
}

// Whatever micro-batches suit the devices: of 32 samples one size for all would leave 16 and 16.
TEST_F(PlanFileTest, SharesAreProportionsOfSamples) {
  struct Row {
    std::vector<std::string> flags;
    std::vector<int64_t> samples;
  };
  for (const Row& row :
       {Row{{"--devices", "cpu:2", "--shares", "1,2"}, {11, 21}},
        Row{{"--devices", "cpu:2", "--shares", "11,21"}, {11, 21}},
        Row{{"--devices", "cpu:3", "--shares", "2,3,3"}, {8, 12, 12}},
        Row{{"--cluster", "rtx-4090:2", "--shares", "1,2"}, {11, 21}},
        Row{{"--cluster", "dgx-a100", "--pp", "4", "--shares", "5,1"}, {27, 5}},
        Row{{"--cluster", "dgx-a100", "--tp", "2", "--shares", "1,1,1,2"}, {6, 6, 7, 13}}}) {
    std::vector<std::string> flags = row.flags;
    flags.insert(flags.end(), {"--batch-size", "32"});
    std::vector<int64_t> samples;
    const Json plan = found(flags);
    for (const Json& share : plan["shares"]) {
      samples.push_back(share["num_samples"]);
    }
    EXPECT_EQ(samples, row.samples) << row.flags.back();
  }
}

TEST_F(PlanFileTest, AReportIsTakenForThePlanInIt) {
  const std::vector<std::string> flags = {"--devices", "cpu:2", "--pp", "2", "--batch-size", "4"};
  const ProgramResult searched = plan(flags);
  const Json report = Json::parse(searched.out);
  EXPECT_EQ(followed(report, {"--devices", "cpu:2"}), report["plan"]);
  expect_refused({{"feasible", false}}, {"--devices", "cpu:2"}, HasSubstr("found no plan"));
}

// One imported node becomes several operators; a plan's stages end with imported nodes.
TEST_F(PlanFileTest, AStageMayEndWithAnyImportedNode) {
  ASSERT_EQ(run_trainrt({"model", "mlp", "--layers", "2", "-o", model()}).exit_code, 0);
  const Json stages = found({"--devices", "cpu:4", "--pp", "4", "--batch-size", "8"})["stages"];
  EXPECT_EQ(stages.size(), 4u);
  EXPECT_EQ(found({"--devices", "cpu:2", "--pp", "2", "--virtual-stages", "2", "--batch-size", "8"})
                ["stages"]
                    .size(),
            4u);
  const ProgramResult many = plan({"--devices", "cpu:8", "--pp", "8", "--batch-size", "8"});
  EXPECT_EQ(many.exit_code, 2);
  EXPECT_THAT(many.err, HasSubstr("--pp 8 asks for 8 stages, and the model has 5 blocks"));
  const ProgramResult twelve =
      plan({"--devices", "cpu:4", "--pp", "4", "--virtual-stages", "3", "--batch-size", "8"});
  EXPECT_EQ(twelve.exit_code, 2);
  EXPECT_THAT(twelve.err, HasSubstr("--pp 4 x --virtual-stages 3 asks for 12 stages"));
}

class RunPlanFileTest : public PlanFileTest {
 protected:
  ProgramResult run_with(const Json& file, std::vector<std::string> flags) const {
    write_text(folder_.file("plan.json"), file.dump());
    flags.insert(flags.begin(),
                 {"run", model(), "--steps", "2", "--plan", folder_.file("plan.json")});
    return run_trainrt(flags);
  }
};

// The batch of the plan is the batch of the run, and what is left open is planned.
TEST_F(RunPlanFileTest, TheRunFollowsWhatIsSaid) {
  const std::string metrics = folder_.file("m.jsonl");
  const Json whole = found({"--devices", "cpu:2", "--pp", "2", "--batch-size", "4"});
  for (const Json& file : {whole, Json{{"pipeline_parallel", 2}, {"global_batch", 4}}}) {
    const ProgramResult result = run_with(file, {"--devices", "cpu:2", "--metrics", metrics});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("2 pipeline"));
    const std::string text = file_text(metrics);
    EXPECT_EQ(Json::parse(text.substr(0, text.find('\n')))["samples"], 4);
  }
  const ProgramResult exact =
      run_with({{"data_parallel", 2}, {"reduction", "exact"}}, {"--devices", "cpu:2"});
  EXPECT_EQ(exact.exit_code, 0) << exact.err;
}

TEST_F(RunPlanFileTest, FlagsThatSayOtherwiseAreRefused) {
  const Json two = found({"--devices", "cpu:2", "--pp", "2", "--batch-size", "4"});
  const auto refused = [&](std::vector<std::string> flags, const std::string& message) {
    flags.insert(flags.end(), {"--devices", "cpu:2"});
    const ProgramResult result = run_with(two, flags);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
  };
  refused({"--pp", "1"}, "--pp 1 contradicts");
  refused({"--zero", "1"}, "--zero 1 contradicts");
  refused({"--schedule", "gpipe"}, "--schedule gpipe contradicts");
  refused({"--recompute", "full"}, "--recompute full contradicts");
  refused({"--batch-size", "8"}, "--batch-size 8 contradicts");
  refused({"--precision", "bf16"}, "--precision bf16 contradicts");
  refused({"--reduction", "exact"}, "--reduction exact contradicts");
  refused({"--batch-norm", "sync"}, "--batch-norm sync contradicts");
  refused({"--offload", "optimizer"}, "--offload optimizer contradicts");
  refused({"--shares", "1"}, "--shares contradicts");
}

// A model that carries a plan is pinned by it, unless that is turned off.
TEST_F(PlanFileTest, TheModelsOwnPlanHolds) {
  const TemporaryFolder folder;
  const std::string carries = folder.file("a.onnx");
  const ProgramResult first = run_trainrt({"plan",
                                           model(),
                                           "--devices",
                                           "cpu:4",
                                           "--pp",
                                           "2",
                                           "--dp",
                                           "2",
                                           "--shares",
                                           "1,3",
                                           "--batch-size",
                                           "8",
                                           "--micro-batch-size",
                                           "1",
                                           "--annotate",
                                           carries});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const auto shares_of = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> all = {"plan", carries, "--devices", "cpu:4", "--format", "json"};
    all.insert(all.end(), flags.begin(), flags.end());
    const ProgramResult result = run_trainrt(all);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Json::parse(result.out)["plan"]["shares"];
  };
  EXPECT_EQ(shares_of({})[1]["num_samples"], 6);
  EXPECT_EQ(shares_of({"--plan", "none", "--dp", "4"}).size(), 4u);
  const ProgramResult fewer = run_trainrt({"plan", carries, "--devices", "cpu:3"});
  EXPECT_EQ(fewer.exit_code, 2);
  EXPECT_THAT(fewer.err, AllOf(HasSubstr("1 more than the cluster has"), HasSubstr("carries")));
}

// What the report lists beside the chosen plan can be asked for as it stands there.
TEST_F(PlanFileTest, AlternativesAreFiles) {
  write_text(folder_.file("c.yaml"),
             "hosts:\n  - devices: [{count: 3, type: cpu}, {count: 1, type: cpu, speed: 0.5}]\n");
  for (const std::vector<std::string>& devices :
       {std::vector<std::string>{"--devices", "cpu:4"}, {"--cluster", folder_.file("c.yaml")}}) {
    const ProgramResult result = plan(devices);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Json alternatives = Json::parse(result.out)["alternatives"];
    ASSERT_FALSE(alternatives.empty());
    int fit = 0;
    for (const Json& alternative : alternatives) {
      const std::string why = alternative["rejected_because"];
      if (why.find("does not fit") != std::string::npos) {
        continue;
      }
      ++fit;
      Json plan = alternative["plan"];
      const Json again = followed(plan, devices);
      for (const auto& [key, value] : plan.items()) {
        EXPECT_EQ(again[key], value) << key << " of " << plan;
      }
    }
    EXPECT_GT(fit, 0);
  }
}

// A share may be less than the micro-batch that its kind of device would take.
TEST_F(PlanFileTest, AlternativesOfShortSharesNameTheLargestMicroBatch) {
  const std::string cnn = folder_.file("cnn.onnx");
  write_model("cnn", cnn);
  write_text(folder_.file("c.yaml"),
             "hosts:\n  - devices: [{count: 4, type: a100-80gb-sxm}]\n"
             "  - devices: [{count: 4, type: v100-32gb-sxm}]\n");
  const std::vector<std::string> command = {
      "plan", cnn, "--format", "json", "--cluster", folder_.file("c.yaml"), "--batch-size", "24"};
  const ProgramResult result = run_trainrt(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  int with_shares = 0;
  const Json report = Json::parse(result.out);
  for (const Json& alternative : report["alternatives"]) {
    if (!alternative["plan"].contains("shares")) {
      continue;
    }
    ++with_shares;
    write_text(folder_.file("plan.json"), alternative["plan"].dump());
    std::vector<std::string> again = command;
    again.insert(again.end(), {"--plan", folder_.file("plan.json")});
    EXPECT_EQ(run_trainrt(again).exit_code, 0) << alternative["plan"];
  }
  EXPECT_GT(with_shares, 0);
}

}  // namespace
}  // namespace trainrt::testing
