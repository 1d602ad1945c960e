#include "tests/support/random_model.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "tests/support/model_writer.h"

namespace trainrt::testing {

namespace {

int64_t pick(std::mt19937_64& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

// What is drawn once, and written at every micro-batch size.
struct Recipe {
  int64_t sequence = 0, hidden = 0, heads = 0, vocabulary = 0;
  bool tied = false;
  std::vector<int> blocks;
  std::vector<int64_t> widths;
};

class RecipeWriter {
 public:
  RecipeWriter(const Recipe& recipe, Graph& graph, int64_t batch)
      : r_(recipe), graph_(graph), m_(graph, DType::kFloat64), batch_(batch) {}

  int write() {
    const ValueId ids = graph_.add_input("ids", {DType::kInt64, {batch_, r_.sequence}}, 0);
    const ValueId table = m_.parameter("table", {r_.vocabulary, r_.hidden});
    ValueId x = m_.emit("Gather", {table, ids}, {{"axis", int64_t{0}}});
    for (size_t i = 0; i < r_.blocks.size(); ++i) {
      x = block(r_.blocks[i], r_.widths[i], x, concat("b", i));
    }
    graph_.outputs() = {r_.tied ? m_.emit("MatMul", {x, table}, {{"trans_b", int64_t{1}}})
                                : m_.linear("head", x, r_.hidden, r_.vocabulary)};
    return m_.num_nodes();
  }

  static constexpr int kNumBlocks = 9;

 private:
  ValueId block(int kind, int64_t width, ValueId x, const std::string& name) {
    const int64_t h = r_.hidden;
    switch (kind) {
      case 0: {  // a residual perceptron
        const ValueId wide = m_.emit("Relu", {m_.linear(name + ".up", x, h, width)});
        return m_.emit("Add", {x, m_.linear(name + ".down", wide, width, h)});
      }
      case 1:
        return m_.emit("Add", {x, attention(x, name)});
      case 2:  // a gain and a bias
        return m_.emit("Add",
                       {m_.emit("Mul", {x, m_.parameter(name + ".gain", {h})}),
                        m_.parameter(name + ".shift", {h})});
      case 3:  // what every position sums to, spread over the others
        return m_.emit("Add", {x, sum(x, 1)});
      case 4: {  // divided by the sum of exponentials over the hidden dim
        const ValueId e = m_.emit("Exp", {m_.emit("Tanh", {x})});
        return m_.emit("Div", {e, sum(e, 2)});
      }
      case 5: {  // joined with a projection, and cut again
        const ValueId both =
            m_.emit("Concat", {x, m_.linear(name + ".side", x, h, width)}, {{"axis", int64_t{2}}});
        return m_.linear(name + ".join", both, h + width, h);
      }
      case 6: {  // a gate: two parts of one projection
        const ValueId two = m_.linear(name + ".gate", x, h, 2 * width);
        const ValueId gated =
            m_.emit("Mul", {m_.emit("Tanh", {part(two, 0, width)}), part(two, width, 2 * width)});
        return m_.emit("Add", {x, m_.linear(name + ".out", gated, width, h)});
      }
      case 7: {  // mixed over positions
        const ValueId turned = m_.emit("Transpose", {x}, {{"perm", Shape{0, 2, 1}}});
        const ValueId mixed = m_.linear(name + ".mix", turned, r_.sequence, r_.sequence);
        return m_.emit("Add", {x, m_.emit("Transpose", {mixed}, {{"perm", Shape{0, 2, 1}}})});
      }
      default: {  // through one long row
        const ValueId row = m_.emit("Reshape", {x}, {{"shape", Shape{batch_, r_.sequence * h}}});
        const ValueId small =
            m_.emit("Tanh", {m_.linear(name + ".in", row, r_.sequence * h, width)});
        const ValueId back = m_.linear(name + ".back", small, width, r_.sequence * h);
        return m_.emit("Add",
                       {x, m_.emit("Reshape", {back}, {{"shape", Shape{batch_, r_.sequence, h}}})});
      }
    }
  }

  ValueId sum(ValueId x, int64_t axis) {
    return m_.emit("ReduceSum", {x}, {{"axes", Shape{axis}}, {"keepdims", int64_t{1}}});
  }
  ValueId part(ValueId x, int64_t begin, int64_t end) {
    return m_.emit(
        "Slice",
        {x},
        {{"axes", Shape{2}}, {"starts", Shape{begin}}, {"ends", Shape{end}}, {"steps", Shape{1}}});
  }
  ValueId heads(ValueId x) {
    x = m_.emit(
        "Reshape", {x}, {{"shape", Shape{batch_, r_.sequence, r_.heads, r_.hidden / r_.heads}}});
    return m_.emit("Transpose", {x}, {{"perm", Shape{0, 2, 1, 3}}});
  }
  ValueId attention(ValueId x, const std::string& name) {
    const int64_t h = r_.hidden;
    const ValueId q = heads(m_.linear(name + ".q", x, h, h));
    const ValueId k = heads(m_.linear(name + ".k", x, h, h));
    const ValueId v = heads(m_.linear(name + ".v", x, h, h));
    const ValueId scores = m_.emit("Exp", {m_.emit("MatMul", {q, k}, {{"trans_b", int64_t{1}}})});
    ValueId mixed = m_.emit("MatMul", {m_.emit("Div", {scores, sum(scores, 3)}), v});
    mixed = m_.emit("Transpose", {mixed}, {{"perm", Shape{0, 2, 1, 3}}});
    mixed = m_.emit("Reshape", {mixed}, {{"shape", Shape{batch_, r_.sequence, h}}});
    return m_.linear(name + ".o", mixed, h, h);
  }

  const Recipe& r_;
  Graph& graph_;
  ModelWriter m_;
  int64_t batch_;
};

Tensor random_ints(uint64_t key, const Shape& shape, int64_t below, bool ignore_some) {
  Tensor tensor(DType::kInt64, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const RandomBlock block = philox(key, static_cast<uint64_t>(i), 1);
    const bool ignored = ignore_some && block[1] % 5 == 0;
    tensor.data<int64_t>()[i] = ignored ? -100 : static_cast<int64_t>(block[0]) % below;
  }
  return tensor;
}

}  // namespace

RandomModel random_model(std::mt19937_64& random, int64_t batch) {
  Recipe recipe;
  recipe.heads = pick(random, 1, 5);
  recipe.hidden = recipe.heads * pick(random, 1, 4);
  recipe.sequence = pick(random, 1, 6);
  recipe.vocabulary = pick(random, 5, 23);
  recipe.tied = random() % 2 == 0;
  RandomModel model;
  model.description = concat("hidden ",
                             recipe.hidden,
                             " in ",
                             recipe.heads,
                             " heads, sequence ",
                             recipe.sequence,
                             ", vocabulary ",
                             recipe.vocabulary,
                             recipe.tied ? " tied" : "",
                             ", blocks");
  for (int64_t i = pick(random, 1, 4); i > 0; --i) {
    recipe.blocks.push_back(static_cast<int>(pick(random, 0, RecipeWriter::kNumBlocks - 1)));
    recipe.widths.push_back(pick(random, 1, 13));
    model.description += concat(" ", recipe.blocks.back(), ":", recipe.widths.back());
  }
  Graph probe;
  model.num_nodes = RecipeWriter(recipe, probe, batch).write();
  for (const ValueId id : probe.values_of_kind(ValueKind::kParameter)) {
    model.parameters.emplace_back(probe.value(id).name, probe.value(id).type.shape);
  }
  model.factory = [recipe](int64_t size, bool accumulate) {
    Graph graph;
    RecipeWriter(recipe, graph, size).write();
    TrainingSpec spec;
    spec.loss.kind = "softmax_cross_entropy";
    spec.loss.output = graph.value(graph.outputs().at(0)).name;
    spec.loss.labels = "labels";
    spec.loss.labels_shape = {size, recipe.sequence};
    spec.optimizer.name = "momentum";
    spec.optimizer.clip_norm = 1;
    spec.accumulate = accumulate;
    return build_training_graph(std::move(graph), spec);
  };
  const uint64_t key = random();
  model.feeds = [=](int step) {
    const Shape shape = {batch, recipe.sequence};
    const uint64_t k = key + 2 * static_cast<uint64_t>(step);
    return std::map<std::string, Tensor>{
        {"ids", random_ints(k, shape, recipe.vocabulary, false)},
        {"labels", random_ints(k + 1, shape, recipe.vocabulary, true)}};
  };
  return model;
}

int run_stress(int argc,
               char** argv,
               const std::string& program,
               const std::function<void(std::mt19937_64&, std::string& what)>& one_case) {
  ::testing::InitGoogleTest(&argc, argv);
  uint64_t seed = 1, count = 1000;
  double seconds = 0;  // 0: no limit
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--seed") == 0) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (has_value && std::strcmp(argv[i], "--count") == 0) {
      count = std::strtoull(argv[++i], nullptr, 10);
    } else if (has_value && std::strcmp(argv[i], "--seconds") == 0) {
      seconds = std::strtod(argv[++i], nullptr);
    } else {
      std::fprintf(stderr, "usage: %s [--seed N] [--count N] [--seconds T]\n", argv[0]);
      return 2;
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  uint64_t done = 0;
  for (; done < count && (seconds == 0 || elapsed() < seconds); ++done) {
    std::mt19937_64 random(seed + done);
    std::string description;
    try {
      one_case(random, description);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) {
      std::printf("%s: case failed: %s\nrepeat: %s --seed %llu --count 1\n",
                  program.c_str(),
                  description.c_str(),
                  argv[0],
                  static_cast<unsigned long long>(seed + done));
      return 1;
    }
  }
  std::printf("%s: %llu cases from seed %llu without a difference in %.0f s\n",
              program.c_str(),
              static_cast<unsigned long long>(done),
              static_cast<unsigned long long>(seed),
              elapsed());
  return 0;
}

}  // namespace trainrt::testing
