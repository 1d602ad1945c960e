#include "tests/support/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/graph_builder.h"

namespace trainrt::testing {

namespace {

Tensor random_like(const TensorType& type, std::mt19937_64& generator) {
  Tensor tensor(type.dtype, type.shape);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.data<double>()[i] = uniform(generator);
  }
  return tensor;
}

// The elements to check: all, or some drawn at random.
std::vector<int64_t> choose(int64_t n, int most, std::mt19937_64& generator) {
  std::vector<int64_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), int64_t{0});
  std::shuffle(all.begin(), all.end(), generator);
  all.resize(std::min(all.size(), static_cast<size_t>(most)));
  return all;
}

class Objective {
 public:
  Objective(const Graph& graph, std::vector<ValueId> outputs, std::vector<Tensor> upstream)
      : graph_(graph), outputs_(std::move(outputs)), upstream_(std::move(upstream)) {}

  double operator()(const std::map<std::string, Tensor>& feeds) const {
    const std::vector<Tensor> values = evaluate(graph_, feeds, outputs_);
    long double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      for (int64_t j = 0; j < values[i].num_elements(); ++j) {
        sum +=
            static_cast<long double>(values[i].data<double>()[j]) * upstream_[i].data<double>()[j];
      }
    }
    return static_cast<double>(sum);
  }

 private:
  const Graph& graph_;
  std::vector<ValueId> outputs_;
  std::vector<Tensor> upstream_;
};

}  // namespace

::testing::AssertionResult gradients_match_finite_differences(
    const Graph& graph,
    const std::vector<ValueId>& outputs,
    const std::vector<ValueId>& inputs,
    const std::map<std::string, Tensor>& feeds,
    const GradientCheckOptions& options) {
  std::mt19937_64 generator(options.seed);
  Graph with_gradients = graph;
  GraphBuilder builder(with_gradients);
  std::vector<Tensor> upstream;
  std::vector<ValueId> seeds;
  for (const ValueId output : outputs) {
    upstream.push_back(random_like(graph.value(output).type, generator));
    seeds.push_back(builder.constant(upstream.back(), "upstream"));
  }
  const std::vector<ValueId> grads = differentiate(with_gradients, outputs, seeds, inputs);
  const Objective objective(graph, outputs, upstream);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Value& input = graph.value(inputs[i]);
    if (grads[i] == kNoValue) {
      return ::testing::AssertionFailure() << "no gradient flows to '" << input.name << "'";
    }
    const Tensor analytic = evaluate(with_gradients, feeds, {grads[i]}).at(0);
    const double* gradient = analytic.data<double>();
    double largest = 1;
    for (int64_t j = 0; j < analytic.num_elements(); ++j) {
      largest = std::max(largest, std::abs(gradient[j]));
    }
    std::map<std::string, Tensor> moved = feeds;
    Tensor& x = moved.at(input.name);
    x = x.clone();
    for (const int64_t j : choose(x.num_elements(), options.max_elements, generator)) {
      const double at = x.data<double>()[j];
      const double step = options.step * std::max(1.0, std::abs(at));
      x.data<double>()[j] = at + step;
      const double above = objective(moved);
      x.data<double>()[j] = at - step;
      const double below = objective(moved);
      x.data<double>()[j] = at;
      const double numeric = (above - below) / (2 * step);
      if (!(std::abs(numeric - gradient[j]) <= options.tolerance * largest)) {
        return ::testing::AssertionFailure()
               << "gradient of '" << input.name << "' at element " << j << " (x = " << at
               << "): rule says " << gradient[j] << ", finite difference " << numeric << " (seed "
               << options.seed << ")";
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace trainrt::testing
