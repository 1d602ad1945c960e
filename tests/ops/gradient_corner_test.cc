// Gradients where the function has a kink, a tie, a pole or an index from the end: places that
// random examples miss, and where others had to correct their rules.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "graph/op_def.h"

namespace trainrt::testing {
namespace {

using Doubles = std::vector<double>;
using Ints = std::vector<int64_t>;

class Problem : public GraphBuilder {
 public:
  Problem() : GraphBuilder(graph_) {}

  ValueId parameter(const Doubles& values, Shape shape) {
    const Tensor data = Tensor::from(values, std::move(shape));
    Value value;
    value.name = concat("parameter", feeds_.size());
    value.type = {DType::kFloat64, data.shape()};
    value.kind = ValueKind::kParameter;
    feeds_[value.name] = data;
    return graph_.add_value(value);
  }
  ValueId vector(const Doubles& values) {
    return parameter(values, {static_cast<int64_t>(values.size())});
  }
  // d (sum of y) / d x.
  Doubles gradient(ValueId y, ValueId x) {
    const ValueId seed = fill(1, type(y));
    const ValueId grad = differentiate(graph_, {y}, {seed}, {x}).at(0);
    return evaluate(graph_, feeds_, {grad}).at(0).to_double();
  }

 private:
  Graph graph_;
  std::map<std::string, Tensor> feeds_;
};

TEST(GradientCornerTest, TiesOfMinAndMaxWeighOneInTotal) {
  for (const char* op_type : {"Min", "Max"}) {
    Problem p;
    const ValueId a = p.vector({1, 2, 3}), b = p.vector({1, 3, 2});
    const ValueId y = p.op(op_type, {a, b});
    const Doubles da = p.gradient(y, a), db = p.gradient(y, b);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(da[i] + db[i], 1) << op_type << " " << i;
    }
    EXPECT_EQ(da[0], 0.5);
  }
}

TEST(GradientCornerTest, TiesOfReduceMaxShareEvenly) {
  Problem p;
  const ValueId x = p.parameter({5, 1, 5, 5, 2, 0}, {2, 3});
  const ValueId y = p.op("ReduceMax", {x}, {{"axes", Ints{1}}, {"keepdims", int64_t{0}}});
  EXPECT_EQ(p.gradient(y, x), (Doubles{0.5, 0, 0.5, 1, 0, 0}));
}

TEST(GradientCornerTest, WhereSelectsAndNeverMultiplies) {
  Problem p;
  const ValueId x = p.vector({1, 2});
  const ValueId condition = p.constant(Tensor::from<bool>({true, false}, {2}));
  const double infinity = std::numeric_limits<double>::infinity();
  const ValueId masked = p.where(condition, x, p.scalar(-infinity, DType::kFloat64));
  EXPECT_EQ(p.gradient(p.op("Exp", {masked}), x), (Doubles{std::exp(1.0), 0}));
}

TEST(GradientCornerTest, GatherCountsNegativeIndicesFromTheEnd) {
  Problem p;
  const ValueId x = p.vector({1, 2, 3});
  const ValueId y = p.op("Gather",
                         {x, p.constant(Tensor::from<int64_t>({-1, 0, 2, -1}, {4}))},
                         {{"axis", int64_t{0}}});
  EXPECT_EQ(p.gradient(y, x), (Doubles{1, 0, 3}));
}

TEST(GradientCornerTest, ClipLetsTheGradientThroughAtItsBounds) {
  Problem p;
  const ValueId x = p.vector({-1, 0, 0.5, 1, 2});
  const ValueId y = p.op("Clip", {x}, {{"min", 0.0}, {"max", 1.0}});
  EXPECT_EQ(p.gradient(y, x), (Doubles{0, 1, 1, 1, 0}));
}

TEST(GradientCornerTest, KinksAtZeroFollowPyTorch) {
  for (const auto& [op_type, expected] :
       {std::pair<const char*, double>{"Relu", 0}, {"Abs", 0}, {"LeakyRelu", 0.01}}) {
    Problem p;
    const ValueId x = p.vector({0});
    EXPECT_EQ(p.gradient(p.op(op_type, {x}), x), Doubles{expected}) << op_type;
  }
}

TEST(GradientCornerTest, PowIsFiniteAtZero) {
  Problem p;
  const ValueId x = p.vector({0, 0, 2}), e = p.vector({0, 2, 3});
  const ValueId y = p.op("Pow", {x, e});
  EXPECT_EQ(p.gradient(y, x), (Doubles{0, 0, 12}));
  EXPECT_EQ(p.gradient(y, e), (Doubles{0, 0, 8 * std::log(2.0)}));
}

TEST(GradientCornerTest, NormOfZeroHasZeroGradient) {
  Problem p;
  const ValueId x = p.parameter({0, 0, 3, 4}, {2, 2});
  const ValueId y = p.op("ReduceL2", {x}, {{"axes", Ints{1}}, {"keepdims", int64_t{0}}});
  const Doubles dx = p.gradient(y, x), expected = {0, 0, 0.6, 0.8};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_DOUBLE_EQ(dx[i], expected[i]);
  }
}

TEST(GradientCornerTest, ProductWithZerosNeedsNoDivision) {
  Problem p;
  const ValueId x = p.parameter({2, 0, 3, 0, 0, 5}, {2, 3});
  const ValueId y = p.op("ReduceProd", {x}, {{"axes", Ints{1}}, {"keepdims", int64_t{0}}});
  EXPECT_EQ(p.gradient(y, x), (Doubles{0, 6, 0, 0, 0, 0}));
}

TEST(GradientCornerTest, AFlowThatMeetsInOneValueIsSummed) {
  Problem p;
  const ValueId x = p.vector({3});
  EXPECT_EQ(p.gradient(p.mul(x, x), x), Doubles{6});
}

TEST(GradientCornerTest, AnIndexOutsideOfTheDataIsNamed) {
  Problem p;
  const ValueId x = p.vector({1, 2, 3});
  const ValueId y =
      p.op("Gather", {x, p.constant(Tensor::from<int64_t>({3}, {1}))}, {{"axis", int64_t{0}}});
  try {
    p.gradient(y, x);
    FAIL() << "index 3 of 3 rows was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message().find("index 3"), std::string::npos) << error.message();
  }
}

}  // namespace
}  // namespace trainrt::testing
