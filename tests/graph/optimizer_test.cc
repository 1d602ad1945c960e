// The update against PyTorch's optimizers in float64 (tests/data/optimizers.py), and LAMB against a
// transcription of its paper.
#include "graph/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "graph/graph_builder.h"
#include "graph/verifier.h"
#include "tests/support/paths.h"
#include "tests/support/training_loop.h"

namespace trainrt {

namespace {

using nlohmann::json;
using Vector = std::vector<double>;

// A graph with one parameter whose gradient is fed.
TrainingGraph update_of(const OptimizerSpec& spec, const Shape& shape, const Vector& initial) {
  TrainingGraph training;
  Graph& graph = training.graph;
  Value parameter;
  parameter.name = "p";
  parameter.type = {DType::kFloat64, shape};
  parameter.kind = ValueKind::kParameter;
  parameter.source = {"test", [=] { return Tensor::from<double>(initial, shape); }};
  const ValueId p = graph.add_value(parameter);
  const ValueId g = graph.add_input("g", {DType::kFloat64, shape});
  GraphBuilder builder(graph);
  training.loss_sum = builder.scalar(0, DType::kFloat64);
  training.item_count = builder.scalar(1, DType::kFloat64);
  training.grad_norm = build_update(graph, {{p, g}}, spec);
  verify(graph, "update");
  return training;
}

OptimizerSpec spec_from(const json& c) {
  OptimizerSpec spec;
  const json& o = c["options"];
  spec.name = c["optimizer"];
  spec.weight_decay = o.value("weight_decay", 0.0);
  spec.momentum = o.value("momentum", 0.9);
  spec.nesterov = o.value("nesterov", false);
  spec.beta1 = o.value("beta1", 0.9);
  spec.beta2 = o.value("beta2", 0.999);
  spec.eps = o.value("eps", 1e-8);
  spec.clip_norm = o.value("clip_norm", 0.0);
  return spec;
}

json golden() {
  std::ifstream file(testing::source_path("tests/data/optimizers.json"));
  return json::parse(file);
}

TEST(OptimizerTest, TenStepsAgreeWithPyTorch) {
  const json data = golden();
  const Shape shape = data["shape"].get<Shape>();
  int num_cases = 0;
  for (const json& c : data["cases"]) {
    SCOPED_TRACE(c["optimizer"].get<std::string>() + c["options"].dump());
    testing::TrainingLoop loop(update_of(spec_from(c), shape, data["initial"].get<Vector>()));
    for (size_t step = 0; step < data["gradients"].size(); ++step) {
      const Tensor g = Tensor::from<double>(data["gradients"][step].get<Vector>(), shape);
      const double norm = loop.step({{{"g", g}}}, data["lr"]).grad_norm;
      EXPECT_NEAR(norm, c["steps"][step]["norm"].get<double>(), 1e-6 * norm);
      const Vector actual = loop.value("p").to_double();
      const Vector wanted = c["steps"][step]["param"].get<Vector>();
      for (size_t i = 0; i < wanted.size(); ++i) {
        ASSERT_NEAR(actual[i], wanted[i], 1e-7) << "step " << step << " element " << i;
      }
    }
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 10);
}

TEST(OptimizerTest, LossScaleIsTakenOffTheGradients) {
  const json data = golden();
  const Shape shape = data["shape"].get<Shape>();
  for (const char* name : {"sgd", "momentum", "adam", "adamw", "adagrad", "lamb"}) {
    OptimizerSpec spec;
    spec.name = name;
    spec.clip_norm = 0.5;
    testing::TrainingLoop plain(update_of(spec, shape, data["initial"].get<Vector>()));
    testing::TrainingLoop scaled(update_of(spec, shape, data["initial"].get<Vector>()));
    for (const json& gradient : data["gradients"]) {
      Vector g = gradient.get<Vector>();
      const double norm = plain.step({{{"g", Tensor::from<double>(g, shape)}}}, 0.125).grad_norm;
      for (double& x : g) {
        x *= 1024;
      }
      EXPECT_EQ(scaled.step({{{"g", Tensor::from<double>(g, shape)}}}, 0.125, 1024).grad_norm,
                norm);
    }
    EXPECT_TRUE(identical(plain.value("p"), scaled.value("p"))) << name;
  }
}

TEST(OptimizerTest, NonFiniteGradientLeavesEverythingAsItWas) {
  const Shape shape = {2, 2};
  for (const char* name : {"sgd", "momentum", "adam", "adamw", "adagrad", "lamb"}) {
    OptimizerSpec spec;
    spec.name = name;
    testing::TrainingLoop loop(update_of(spec, shape, {1, 2, 3, 4}));
    loop.step({{{"g", Tensor::from<double>({1, -1, 2, 0.5}, shape)}}}, 0.125);
    std::map<std::string, Tensor> before;
    for (const StateUpdate& update : loop.training().graph.updates()) {
      const std::string target = loop.training().graph.value(update.target).name;
      before[target] = loop.value(target);
    }
    const double norm =
        loop.step({{{"g", Tensor::from<double>({1, NAN, 2, 0.5}, shape)}}}, 0.125).grad_norm;
    EXPECT_FALSE(std::isfinite(norm));
    for (const auto& [target, tensor] : before) {
      EXPECT_TRUE(identical(tensor, loop.value(target))) << name << " " << target;
    }
  }
}

// The paper's algorithm 2 with phi(x) = x, element by element in double.
struct LambReference {
  Vector p, m, v;
  double decay, beta1, beta2, eps;

  void step(const Vector& g, double lr, int t) {
    Vector u(p.size());
    double p_norm = 0;
    double u_norm = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      m[i] = beta1 * m[i] + (1 - beta1) * g[i];
      v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(beta1, t));
      const double v_hat = v[i] / (1 - std::pow(beta2, t));
      u[i] = m_hat / (std::sqrt(v_hat) + eps) + decay * p[i];
      p_norm += p[i] * p[i];
      u_norm += u[i] * u[i];
    }
    const double ratio = p_norm == 0 || u_norm == 0 ? 1 : std::sqrt(p_norm / u_norm);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] -= lr * ratio * u[i];
    }
  }
};

TEST(OptimizerTest, LambFollowsThePaper) {
  const json data = golden();
  const Shape shape = data["shape"].get<Shape>();
  for (const bool start_at_zero : {false, true}) {
    const Vector initial = start_at_zero ? Vector(15, 0.0) : data["initial"].get<Vector>();
    OptimizerSpec spec;
    spec.name = "lamb";
    spec.eps = 1e-6;
    testing::TrainingLoop loop(update_of(spec, shape, initial));
    LambReference reference{initial, Vector(15), Vector(15), 0.01, 0.9, 0.999, 1e-6};
    for (int step = 0; step < 10; ++step) {
      const Vector g = data["gradients"][static_cast<size_t>(step)].get<Vector>();
      loop.step({{{"g", Tensor::from<double>(g, shape)}}}, 0.015625);
      reference.step(g, 0.015625, step + 1);
      const Vector actual = loop.value("p").to_double();
      for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_NEAR(actual[i], reference.p[i], 1e-12) << "step " << step << " element " << i;
      }
    }
  }
}

TEST(OptimizerTest, RefusesWhatItCannotDo) {
  OptimizerSpec spec;
  spec.name = "adamm";
  try {
    check_optimizer(spec);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("did you mean 'adam"), std::string::npos)
        << error.what();
  }
  spec.name = "adam";
  spec.beta1 = 1;
  EXPECT_THROW(check_optimizer(spec), Error);
}

}  // namespace

}  // namespace trainrt
