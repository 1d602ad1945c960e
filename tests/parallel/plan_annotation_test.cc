// Plans as ONNX's multi-device annotations: written, valid for ONNX's checker, read back.
#include "parallel/plan_annotation.h"

#include <gtest/gtest.h>
#include <onnx/checker.h>

#include <fstream>

#include "parallel/micro_batches.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using testing::TemporaryFolder;
using testing::write_text;

class PlanAnnotationTest : public ::testing::Test {
 protected:
  PlanAnnotationTest() { write_text(path_, testing::tiny_model()); }

  // Two stages of two data ranks and two tensor ranks; w1 cut by columns, w2 by rows.
  static Plan plan(const OnnxModel& model) {
    Plan plan;
    plan.model_hash = model.hash();
    plan.global_batch = 8;
    plan.micro_batch_size = 2;
    plan.data_parallel = plan.tensor_parallel = plan.pipeline_parallel = 2;
    plan.schedule = ScheduleKind::kGPipe;
    plan.shares = make_shares(8, 2, 2, {1, 3});
    plan.stages = {{0, 0, 0, 2, RecomputeMode::kNone, {}}, {1, 1, 3, 4, RecomputeMode::kFull, {}}};
    plan.placements["w1"] = {Placement::replicate(), Placement::shard(1)};
    plan.placements["w2"] = {Placement::replicate(), Placement::shard(0)};
    return plan;
  }

  static onnx::ModelProto proto(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    onnx::ModelProto model;
    EXPECT_TRUE(model.ParseFromIstream(&in));
    return model;
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.file("tiny.onnx");
  std::string annotated_ = folder_.file("annotated.onnx");
};

TEST_F(PlanAnnotationTest, APlanComesBackWhole) {
  const OnnxModel model = OnnxModel::load(path_);
  write_annotated(model, annotation_of(plan(model), model), annotated_);
  const OnnxModel read = OnnxModel::load(annotated_);
  const std::optional<AnnotatedPlan> back = plan_of_annotation(read);
  ASSERT_TRUE(back.has_value());
  EXPECT_TRUE(back->whole);
  EXPECT_EQ(plan_to_json(back->plan), plan_to_json(plan(model)));
  EXPECT_EQ(read.hash(), model.hash());  // so the plan still belongs to the model
}

TEST_F(PlanAnnotationTest, TheFileSaysItInOnnxsTerms) {
  const OnnxModel model = OnnxModel::load(path_);
  write_annotated(model, annotation_of(plan(model), model), annotated_);
  EXPECT_NO_THROW(onnx::checker::check_model(annotated_, /*full_check=*/true));
  const onnx::ModelProto file = proto(annotated_);
  EXPECT_GE(file.ir_version(), 11);
  ASSERT_EQ(file.configuration_size(), 1);
  EXPECT_EQ(file.configuration(0).num_devices(), 8);
  EXPECT_EQ(file.configuration(0).device_size(), 8);
  const auto& first = file.graph().node(0).device_configurations(0);
  EXPECT_EQ(first.configuration_id(), file.configuration(0).name());
  EXPECT_EQ(first.pipeline_stage(), 0);
  EXPECT_EQ(file.graph().node(4).device_configurations(0).pipeline_stage(), 1);
  // x over the data ranks (each shard on two tensor ranks), w1 over the tensor ranks.
  ASSERT_EQ(first.sharding_spec_size(), 2);
  for (const onnx::ShardingSpecProto& spec : first.sharding_spec()) {
    ASSERT_EQ(spec.sharded_dim_size(), 1) << spec.tensor_name();
    EXPECT_EQ(spec.sharded_dim(0).axis(), spec.tensor_name() == "x" ? 0 : 1);
    EXPECT_EQ(spec.sharded_dim(0).simple_sharding(0).num_shards(), 2);
    ASSERT_EQ(spec.device_size(), 2);
    ASSERT_EQ(spec.index_to_device_group_map_size(), 2);
    const auto& group = spec.index_to_device_group_map(0).value();
    const std::vector<int64_t> members(group.begin(), group.end());
    EXPECT_EQ(
        members,
        spec.tensor_name() == "x" ? (std::vector<int64_t>{0, 1}) : (std::vector<int64_t>{0, 2}));
  }
}

TEST_F(PlanAnnotationTest, AnnotationsOfOthersGiveDegreesStagesAndPlacements) {
  const OnnxModel model = OnnxModel::load(path_);
  DeviceAnnotation annotation = annotation_of(plan(model), model);
  annotation.name = "theirs";
  annotation.metadata.clear();
  write_annotated(model, annotation, annotated_);
  const std::optional<AnnotatedPlan> back = plan_of_annotation(OnnxModel::load(annotated_));
  ASSERT_TRUE(back.has_value());
  EXPECT_FALSE(back->whole);
  EXPECT_EQ(back->plan.data_parallel, 2);
  EXPECT_EQ(back->plan.tensor_parallel, 2);
  EXPECT_EQ(back->plan.pipeline_parallel, 2);
  ASSERT_EQ(back->plan.stages.size(), 2u);
  EXPECT_EQ(back->plan.stages[0].last_node, 2);
  EXPECT_EQ(back->plan.stages[1].first_node, 3);
  EXPECT_EQ(back->plan.placements.at("w1").tensor, Placement::shard(1));
  EXPECT_EQ(back->plan.placements.at("w2").tensor, Placement::shard(0));
}

TEST_F(PlanAnnotationTest, AModelWithoutAnnotationsHasNoPlan) {
  EXPECT_FALSE(plan_of_annotation(OnnxModel::load(path_)).has_value());
}

TEST_F(PlanAnnotationTest, ContradictionsAreExplained) {
  const OnnxModel model = OnnxModel::load(path_);
  const auto expect = [&](const std::function<void(onnx::ModelProto&)>& spoil, const char* words) {
    write_annotated(model, annotation_of(plan(model), model), annotated_);
    onnx::ModelProto file = proto(annotated_);
    file.clear_metadata_props();
    spoil(file);
    std::ofstream(annotated_, std::ios::binary) << file.SerializeAsString();
    try {
      plan_of_annotation(OnnxModel::load(annotated_));
      FAIL() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidModel);
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  const auto configuration = [](onnx::ModelProto& file, int node) {
    return file.mutable_graph()->mutable_node(node)->mutable_device_configurations(0);
  };
  expect([&](auto& file) { configuration(file, 0)->set_configuration_id("other"); },
         "does not define");
  expect([&](auto& file) { configuration(file, 4)->set_pipeline_stage(5); }, "consecutive runs");
  expect([&](auto& file) { file.mutable_configuration(0)->set_num_devices(6); }, "names 8");
  expect(
      [&](auto& file) {
        file.mutable_configuration(0)->clear_device();
        file.mutable_configuration(0)->set_num_devices(2);
      },
      "names device");
  expect(
      [&](auto& file) {
        auto* spec = configuration(file, 0)->mutable_sharding_spec(0);
        spec->mutable_sharded_dim(0)->mutable_simple_sharding(0)->set_num_shards(3);
      },
      "3 shards and names 2");
}

}  // namespace
}  // namespace trainrt
