// What a training graph computes does not depend on how a step is cut into micro-batches, and what
// resolve_loss() makes of models and labels.
#include "graph/training_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "graph/graph_builder.h"
#include "tests/support/training_loop.h"

namespace trainrt {
namespace {

constexpr int64_t kFeatures = 5;
constexpr int64_t kClasses = 4;

Tensor wave(const Shape& shape, double phase) {
  std::vector<double> values(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(0.9 * static_cast<double>(i) + phase);
  }
  return Tensor::from<double>(values, shape);
}

ValueId add_parameter(Graph& graph, const std::string& name, const Shape& shape, double phase) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat64, shape};
  value.kind = ValueKind::kParameter;
  value.source = {"test", [=] { return wave(shape, phase); }};
  return graph.add_value(value);
}

// x [batch, 5] -> tanh(x w1) w2 [batch, 4]; with `tied`, w2 is used once more as its own bias
// source.
Graph classifier(int64_t batch, bool tied = false) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat64, {batch, kFeatures}}, 0);
  const ValueId w1 = add_parameter(graph, "w1", {kFeatures, 3}, 0.1);
  const ValueId w2 = add_parameter(graph, "w2", {3, kClasses}, 0.7);
  const ValueId hidden = builder.op("Tanh", {builder.matmul(x, w1)});
  ValueId scores = builder.matmul(hidden, w2);
  if (tied) {
    scores = builder.add(scores, builder.reduce_sum(builder.mul(w2, w2), {0}, true));
  }
  graph.rename_value(scores, "scores");
  graph.outputs() = {scores};
  return graph;
}

TrainingSpec classes_spec(const Graph& forward, bool accumulate) {
  TrainingSpec spec;
  spec.loss = resolve_loss(forward, {}, nullptr);
  spec.optimizer.name = "adamw";
  spec.accumulate = accumulate;
  return spec;
}

using Feeds = std::map<std::string, Tensor>;

Tensor rows(const Tensor& tensor, int64_t begin, int64_t end) {
  Shape shape = tensor.shape();
  const int64_t row_bytes = tensor.bytes() / shape[0];
  shape[0] = end - begin;
  Tensor part(tensor.dtype(), shape);
  std::copy(tensor.raw() + begin * row_bytes, tensor.raw() + end * row_bytes, part.raw());
  return part;
}

// The step's 6 samples in micro-batches of `size`.
std::vector<Feeds> micro_batches(int64_t size, const std::vector<int64_t>& labels) {
  const Tensor x = wave({6, kFeatures}, 2);
  const Tensor y = Tensor::from<int64_t>(labels, {6});
  std::vector<Feeds> feeds;
  for (int64_t begin = 0; begin < 6; begin += size) {
    feeds.push_back(
        {{"x", rows(x, begin, begin + size)}, {"labels", rows(y, begin, begin + size)}});
  }
  return feeds;
}

TEST(TrainingGraphTest, SplitIntoMicroBatchesChangesNothing) {
  // Ignored labels make the micro-batches' item counts uneven: a mean of means would show.
  const std::vector<int64_t> labels = {0, 3, -100, -100, -100, 2};
  for (const bool tied : {false, true}) {
    const Graph whole = classifier(6, tied);
    testing::TrainingLoop reference(
        build_training_graph(whole, classes_spec(whole, /*accumulate=*/false)));
    for (const int64_t size : {1, 2, 3}) {
      const Graph part = classifier(size, tied);
      testing::TrainingLoop loop(build_training_graph(part, classes_spec(part, true)));
      testing::TrainingLoop fresh(
          build_training_graph(whole, classes_spec(whole, /*accumulate=*/false)));
      for (int step = 0; step < 4; ++step) {
        const auto wanted = fresh.step(micro_batches(6, labels), 0.03125);
        const auto actual = loop.step(micro_batches(size, labels), 0.03125);
        EXPECT_EQ(actual.num_items, 3);
        EXPECT_NEAR(actual.loss, wanted.loss, 1e-12);
        EXPECT_NEAR(actual.grad_norm, wanted.grad_norm, 1e-6 * wanted.grad_norm);
      }
      for (const char* name : {"w1", "w2"}) {
        const std::vector<double> a = loop.value(name).to_double();
        const std::vector<double> b = fresh.value(name).to_double();
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_NEAR(a[i], b[i], 1e-8) << name << " in micro-batches of " << size;
        }
      }
    }
  }
}

TEST(TrainingGraphTest, AGradientThatIsNotFiniteChangesNoParameter) {
  // The derivative of the square root at 0: w2's gradient is finite, w1's is 0 times infinity.
  for (const bool accumulate : {false, true}) {
    Graph graph;
    GraphBuilder builder(graph);
    const ValueId x = graph.add_input("x", {DType::kFloat64, {6, kFeatures}}, 0);
    const ValueId w1 = add_parameter(graph, "w1", {kFeatures, 3}, 0.1);
    const ValueId w2 = add_parameter(graph, "w2", {3, kClasses}, 0.7);
    graph.outputs() = {builder.matmul(builder.op("Sqrt", {builder.matmul(x, w1)}), w2)};
    testing::TrainingLoop loop(build_training_graph(graph, classes_spec(graph, accumulate)));
    const std::vector<double> before1 = loop.value("w1").to_double();
    const std::vector<double> before2 = loop.value("w2").to_double();
    const auto result = loop.step(
        {{{"x", Tensor::from<double>(std::vector<double>(6 * kFeatures, 0.0), {6, kFeatures})},
          {"labels", Tensor::from<int64_t>({0, 3, 1, 1, 0, 2}, {6})}}},
        0.125);
    EXPECT_TRUE(std::isfinite(result.loss));
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_EQ(loop.value("w1").to_double(), before1);
    EXPECT_EQ(loop.value("w2").to_double(), before2);
  }
}

TEST(TrainingGraphTest, TrainingLowersTheLoss) {
  const Graph graph = classifier(6);
  testing::TrainingLoop loop(build_training_graph(graph, classes_spec(graph, true)));
  const std::vector<int64_t> labels = {0, 3, 1, 1, 0, 2};
  const double first = loop.step(micro_batches(6, labels), 0.125).loss;
  double last = first;
  for (int step = 0; step < 50; ++step) {
    last = loop.step(micro_batches(6, labels), 0.125).loss;
  }
  EXPECT_LT(last, 0.2 * first);
}

TEST(TrainingGraphTest, SharedParameterHasAnAccumulatorPerUse) {
  const Graph graph = classifier(2, /*tied=*/true);
  const TrainingGraph training = build_training_graph(graph, classes_spec(graph, true));
  std::vector<std::string> names;
  for (const ValueId id : training.graph.values_of_kind(ValueKind::kGradient)) {
    names.push_back(training.graph.value(id).name);
  }
  // w2 is used by the product and twice by its square.
  EXPECT_EQ(names, (std::vector<std::string>{"w1.grad", "w2.grad.0", "w2.grad.1", "w2.grad.2"}));
}

TEST(TrainingGraphTest, WithoutAccumulationThereIsNoGradientMemory) {
  const Graph graph = classifier(2);
  const TrainingGraph training = build_training_graph(graph, classes_spec(graph, false));
  EXPECT_TRUE(training.graph.values_of_kind(ValueKind::kGradient).empty());
  EXPECT_EQ(training.parameters, (std::vector<std::string>{"w1", "w2"}));
  EXPECT_EQ(training.graph.updates().size(), 6u);  // two parameters with two moments each
}

TEST(TrainingGraphTest, RegionsFollowEachOther) {
  const Graph graph = classifier(2);
  const TrainingGraph training = build_training_graph(graph, classes_spec(graph, true));
  const Graph& g = training.graph;
  const auto region = [&](ValueId id) { return g.node(g.value(id).producer).region; };
  EXPECT_EQ(region(training.item_count), Region::kCount);
  EXPECT_EQ(region(training.loss_sum), Region::kForward);
  EXPECT_EQ(region(training.grad_norm), Region::kUpdate);
  for (const Node& node : g.nodes()) {
    for (const ValueId input : node.inputs) {
      const NodeId producer = input == kNoValue ? kNoNode : g.value(input).producer;
      if (producer != kNoNode) {
        EXPECT_LE(g.node(producer).region, node.region) << node.name;
        EXPECT_EQ(g.node(producer).region == Region::kCount, node.region == Region::kCount)
            << node.name << ": counting comes before everything and leaves only its result";
      }
    }
  }
}

TEST(TrainingGraphTest, ParameterWithoutInfluenceIsLeftAlone) {
  Graph graph = classifier(2);
  GraphBuilder builder(graph);
  const ValueId unused = add_parameter(graph, "aside", {2, 2}, 0);
  graph.outputs().push_back(builder.mul(unused, unused));
  const TrainingGraph training = build_training_graph(graph, classes_spec(graph, true));
  EXPECT_EQ(training.parameters, (std::vector<std::string>{"w1", "w2"}));
  EXPECT_FALSE(training.graph.find_value("aside").has_value() &&
               training.graph.value(*training.graph.find_value("aside")).kind ==
                   ValueKind::kParameter);
}

TEST(TrainingGraphTest, RefusesAModelWithNothingToTrain) {
  Graph graph = classifier(2);
  for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
    graph.value(id).kind = ValueKind::kConstant;
  }
  try {
    build_training_graph(graph, classes_spec(graph, true));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("--freeze"), std::string::npos) << error.what();
  }
}

TEST(TrainingGraphTest, EvaluationCountsWhatIsRight) {
  const Graph graph = classifier(6);
  TrainingGraph eval = build_eval_graph(graph, resolve_loss(graph, {}, nullptr));
  EXPECT_TRUE(eval.graph.updates().empty());
  EXPECT_EQ(eval.grad_norm, kNoValue);
  Feeds feeds = micro_batches(6, {0, 0, 0, 0, 0, 0})[0];
  feeds["w2"] = Tensor::from<double>({1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, {3, kClasses});
  const std::vector<Tensor> values =
      evaluate(eval.graph, feeds, {eval.correct, eval.item_count, eval.loss_sum});
  // All classes but the first score 0, so an item is right where the first scores at least that.
  EXPECT_EQ(values[1].to_double()[0], 6);
  EXPECT_GT(values[0].to_double()[0], 0);
  EXPECT_LE(values[0].to_double()[0], 6);
  EXPECT_TRUE(std::isfinite(values[2].to_double()[0]));
}

// ---- a loss in the graph

Graph with_mean_loss(int64_t batch) {
  Graph graph = classifier(batch);
  GraphBuilder builder(graph);
  const ValueId scores = graph.outputs()[0];
  const ValueId labels = graph.add_input("labels", {DType::kInt64, {batch}}, 0);
  const ValueId maxima = builder.op(
      "ReduceMax", {scores}, {{"axes", std::vector<int64_t>{1}}, {"keepdims", int64_t{0}}});
  const ValueId sums = builder.op("SumExp", {scores, maxima}, {{"axis", int64_t{1}}});
  const Attributes ignore = {{"ignore_index", int64_t{-100}}};
  const ValueId sum = builder.op("SoftmaxCrossEntropyLoss",
                                 {scores, labels, maxima, sums},
                                 {{"axis", int64_t{1}}, {"ignore_index", int64_t{-100}}});
  const ValueId mean = builder.op("MeanLoss",
                                  {sum, builder.op("ItemCount", {labels}, ignore)},
                                  {{"result", std::string("float64")}},
                                  "loss",
                                  "loss");
  graph.outputs() = {mean, scores};
  return graph;
}

TEST(TrainingGraphTest, MeanInTheGraphIsTakenApart) {
  const std::vector<int64_t> labels = {0, 3, -100, -100, -100, 2};
  const Graph plain = classifier(6);
  const Graph meant = with_mean_loss(2);
  TrainingSpec spec = classes_spec(meant, true);
  EXPECT_EQ(spec.loss.kind, "output");
  EXPECT_EQ(spec.loss.output, "loss");
  testing::TrainingLoop wanted(build_training_graph(plain, classes_spec(plain, true)));
  testing::TrainingLoop actual(build_training_graph(meant, spec));
  const auto a = wanted.step(micro_batches(6, labels), 0.03125);
  const auto b = actual.step(micro_batches(2, labels), 0.03125);
  EXPECT_NEAR(a.loss, b.loss, 1e-12);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6 * a.grad_norm);
  EXPECT_EQ(b.num_items, 3);
}

TEST(TrainingGraphTest, EvaluationOfALossInTheGraphCountsWhatIsRight) {
  const Graph plain = classifier(6);
  const Graph meant = with_mean_loss(6);
  const Feeds feeds = micro_batches(6, {0, 3, -100, 1, 0, 2})[0];
  const TrainingGraph a = build_eval_graph(plain, resolve_loss(plain, {}, nullptr));
  const TrainingGraph b = build_eval_graph(meant, resolve_loss(meant, {}, nullptr));
  const std::vector<Tensor> wanted =
      evaluate(a.graph, feeds, {a.loss_sum, a.item_count, a.correct});
  const std::vector<Tensor> actual =
      evaluate(b.graph, feeds, {b.loss_sum, b.item_count, b.correct});
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(identical(wanted[i], actual[i])) << i;
  }
}

TEST(TrainingGraphTest, SumInTheGraphDoesNotDependOnTheSplit) {
  const auto summed = [](int64_t batch) {
    Graph graph = classifier(batch);
    GraphBuilder builder(graph);
    const ValueId square = builder.mul(graph.outputs()[0], graph.outputs()[0]);
    const ValueId sum = builder.reduce_sum(square, {0, 1}, false);
    graph.rename_value(sum, "energy");
    graph.outputs() = {sum};
    return graph;
  };
  const Graph whole = summed(6);
  const Graph part = summed(2);
  testing::TrainingLoop wanted(build_training_graph(whole, classes_spec(whole, true)));
  testing::TrainingLoop actual(build_training_graph(part, classes_spec(part, true)));
  const auto only_x = [](std::vector<Feeds> feeds) {
    for (Feeds& feed : feeds) {
      feed.erase("labels");
    }
    return feeds;
  };
  const std::vector<int64_t> none(6, 0);
  const auto a = wanted.step(only_x(micro_batches(6, none)), 0.03125);
  const auto b = actual.step(only_x(micro_batches(2, none)), 0.03125);
  EXPECT_EQ(b.num_items, 6);
  EXPECT_NEAR(a.loss, b.loss, 1e-12);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6 * a.grad_norm);
}

TEST(TrainingGraphTest, OtherScalarsAreWeightedBySamples) {
  Graph graph = classifier(3);
  GraphBuilder builder(graph);
  const ValueId square = builder.mul(graph.outputs()[0], graph.outputs()[0]);
  graph.outputs() = {builder.op("ReduceMean",
                                {square},
                                {{"axes", std::vector<int64_t>{0, 1}}, {"keepdims", int64_t{0}}},
                                "energy",
                                "energy")};
  const TrainingSpec spec = classes_spec(graph, true);
  EXPECT_EQ(spec.loss.kind, "output");
  testing::TrainingLoop loop(build_training_graph(graph, spec));
  const std::vector<Feeds> feeds = micro_batches(3, {0, 0, 0, 0, 0, 0});
  const auto result = loop.step({{{"x", feeds[0].at("x")}}, {{"x", feeds[1].at("x")}}}, 0.03125);
  double mean = 0;
  for (const Feeds& feed : feeds) {
    mean += evaluate(graph, {{"x", feed.at("x")}}, {graph.outputs()[0]})[0].to_double()[0] / 2;
  }
  EXPECT_EQ(result.num_items, 6);
  EXPECT_NEAR(result.loss, mean, 1e-12);
}

// ---- resolve_loss

Graph with_output(const TensorType& input, const TensorType& output) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId in = graph.add_input("in", input, 0);
  const ValueId out = builder.fill(0, output);
  graph.rename_value(out, "out");
  // Read by something, or it would pass for labels.
  graph.outputs() = {out, builder.cast(in, DType::kFloat64)};
  return graph;
}

TEST(ResolveLossTest, FollowsTheLabels) {
  const Graph graph = with_output({DType::kFloat32, {8, 3}}, {DType::kFloat32, {8, 10}});
  const TensorType classes = {DType::kInt32, {8}};
  const TensorType targets = {DType::kFloat32, {8, 10}};
  EXPECT_EQ(resolve_loss(graph, {}, &classes).kind, "softmax_cross_entropy");
  EXPECT_EQ(resolve_loss(graph, {}, &classes).labels_dtype, DType::kInt32);
  EXPECT_EQ(resolve_loss(graph, {}, &targets).kind, "mse");
  const LossSpec drawn = resolve_loss(graph, {}, nullptr);
  EXPECT_EQ(drawn.kind, "softmax_cross_entropy");
  EXPECT_EQ(drawn.labels_shape, (Shape{8}));
  EXPECT_EQ(drawn.labels, "labels");
}

TEST(ResolveLossTest, LanguageModelPredictsTheNextToken) {
  const Graph graph = with_output({DType::kInt64, {2, 7}}, {DType::kFloat32, {2, 7, 11}});
  const LossSpec spec = resolve_loss(graph, {}, nullptr);
  EXPECT_EQ(spec.kind, "softmax_cross_entropy");
  EXPECT_TRUE(spec.next_token);
  const TensorType labels = {DType::kInt64, {2, 7}};
  EXPECT_FALSE(resolve_loss(graph, {}, &labels).next_token);
  // The last position of each row has no successor.
  TrainingGraph eval = build_eval_graph(graph, spec);
  const Tensor ids = Tensor::from<int64_t>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3}, {2, 7});
  const std::vector<Tensor> values =
      evaluate(eval.graph, {{"in", ids}}, {eval.item_count, eval.loss_sum, eval.correct});
  EXPECT_EQ(values[0].to_double()[0], 12);
  EXPECT_NEAR(values[1].to_double()[0], 12 * std::log(11.0), 1e-5);
  EXPECT_EQ(values[2].to_double()[0], 1);  // all scores tie, class 0 is next once
}

// As many classes as places: [batch, seq, classes] is what 3 dims mean, [batch, classes, ...] 4.
TEST(BuildLossTest, ClassesAreLastOfThreeDimsWhereSizesLeaveItOpen) {
  for (const Shape& shape : {Shape{1, 2, 2}, Shape{1, 2, 2, 2}}) {
    Graph graph;
    const ValueId x = graph.add_input("x", {DType::kFloat32, shape}, 0);
    graph.outputs() = {x};
    LossSpec wanted;
    wanted.kind = "softmax_cross_entropy";
    const TensorType labels = {DType::kInt64, Shape(shape.begin(), shape.end() - 1)};
    const TrainingGraph eval = build_eval_graph(graph, resolve_loss(graph, wanted, &labels));
    Tensor scores(DType::kFloat32,
                  shape);  // of zeros, with one that makes class 1 of the first item
    const bool last = shape.size() == 3;
    for (int64_t i = 0; i < scores.num_elements(); ++i) {
      scores.data<float>()[i] = i == (last ? 1 : 4) ? 10.0F : 0.0F;
    }
    Tensor ids(DType::kInt64, labels.shape);
    for (int64_t i = 0; i < ids.num_elements(); ++i) {
      ids.data<int64_t>()[i] = 1;
    }
    const double right =
        evaluate(eval.graph, {{"x", scores}, {"labels", ids}}, {eval.correct})[0].to_double()[0];
    EXPECT_EQ(right, 1) << shape_string(shape);  // ties elsewhere are class 0
  }
}

// The labels of an encoder-decoder's next token: `inputs` look up a table of `rows` each, and their
// sum is scored against 5 words.
std::vector<double> right_next_tokens(const std::vector<std::string>& inputs,
                                      const std::vector<int64_t>& rows) {
  Graph graph;
  GraphBuilder builder(graph);
  ValueId sum = kNoValue;
  std::map<std::string, Tensor> data;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ValueId ids = graph.add_input(inputs[i], {DType::kInt64, {1, 3}}, 0);
    const ValueId table = builder.constant(Tensor(DType::kFloat32, {rows[i], 5}));
    const ValueId scores = builder.op("Gather", {table, ids});
    sum = sum == kNoValue ? scores : builder.add(sum, scores);
    data[inputs[i]] = i == 0 ? Tensor::from<int64_t>({1, 1, 1}, {1, 3})
                             : Tensor::from<int64_t>({0, 0, 0}, {1, 3});
  }
  graph.outputs() = {sum};
  const TrainingGraph eval = build_eval_graph(graph, resolve_loss(graph, {}, nullptr));
  // All scores tie, so class 0 is predicted: right where the second input's words are the labels.
  return evaluate(eval.graph, data, {eval.correct})[0].to_double();
}

TEST(ResolveLossTest, TheDecodersWordsAreTheNextTokens) {
  EXPECT_THAT(right_next_tokens({"src", "tgt"}, {5, 5}), ::testing::ElementsAre(2));
  EXPECT_THAT(right_next_tokens({"position_ids", "input_ids"}, {3, 5}), ::testing::ElementsAre(2));
  EXPECT_THAT(right_next_tokens({"input_ids", "token_type_ids"}, {5, 2}),
              ::testing::ElementsAre(0));
  try {
    right_next_tokens({"a", "b"}, {5, 5});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'a' and 'b'"));
  }
}

TEST(ResolveLossTest, OneRealNumberPerSampleIsRegression) {
  const Graph graph = with_output({DType::kFloat32, {8, 3}}, {DType::kFloat32, {8, 1}});
  EXPECT_EQ(resolve_loss(graph, {}, nullptr).kind, "mse");
}

TEST(ResolveLossTest, RefusesFloatClassesAndUnknownOutputs) {
  const Graph graph = with_output({DType::kFloat32, {8, 3}}, {DType::kFloat32, {8, 10}});
  const TensorType targets = {DType::kFloat32, {8}};
  LossSpec spec;
  spec.kind = "nll";
  EXPECT_THROW(resolve_loss(graph, spec, &targets), Error);
  spec = {};
  spec.output = "outt";
  try {
    resolve_loss(graph, spec, nullptr);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'out'"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace trainrt
