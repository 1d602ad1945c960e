// What must hold of every registered operator, checked on its own examples.
#include <gtest/gtest.h>

#include <algorithm>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "graph/passes/pass.h"
#include "tests/support/empty_case.h"
#include "tests/support/gradient_check.h"
#include "tests/support/op_example.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

class OperatorTest : public ::testing::TestWithParam<std::string> {
 protected:
  const OpDef& op() const { return get_op(GetParam()); }
};

// Collectives and transfers have an effect but no kernel: communicators carry them out, and
// tests/parallel tests them there.
bool is_communication(const OpDef& op) {
  return op.effect && !op.reference_kernel && !op.cpu_kernel && !op.cpu_factory;
}

// Attributes that name a dtype fix the types of the example.
bool has_dtype_attribute(const OpExample& example) {
  return example.attributes.has("to") || example.attributes.has("dtype");
}

// The case in float64, or in its own types where those are fixed.
NodeCase precise_case(const OpDef& op, const OpExample& example) {
  return make_case(op, example, has_dtype_attribute(example) ? DType::kFloat32 : DType::kFloat64);
}

double precise_tolerance(const NodeCase& test_case) {
  double tolerance = 1e-10;
  for (const TensorTypes* types : {&test_case.input_types, &test_case.output_types}) {
    for (const TensorType& type : *types) {
      if (is_floating(type.dtype) && type.dtype != DType::kFloat64) {
        tolerance = std::max(tolerance, kernel_tolerance(type.dtype));
      }
    }
  }
  return tolerance;
}

TEST_P(OperatorTest, SaysEverythingOrRefusesAloud) {
  EXPECT_TRUE(op().infer_types) << "infer_types";
  EXPECT_TRUE(op().cost) << "cost";
  EXPECT_TRUE(op().sharding) << "sharding";
  if (is_communication(op())) {
    return;
  }
  EXPECT_TRUE(op().reference_kernel) << "reference_kernel";
  EXPECT_FALSE(op().examples.empty()) << "examples";
  // Second derivatives may be missing: differentiate() then refuses by itself.
  const bool is_grad = op().name.find("Grad") != std::string::npos;
  EXPECT_TRUE(op().gradient || op().not_differentiable || is_grad)
      << "needs a gradient, or not_differentiable = true";
  EXPECT_FALSE(op().gradient && op().not_differentiable);
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example);
    for (const Inplace& inplace : op().inplace) {
      EXPECT_LT(inplace.input, static_cast<int>(test_case.inputs.size()));
      EXPECT_LT(inplace.output, static_cast<int>(test_case.output_types.size()));
    }
    const Cost cost = op().cost(test_case.context());
    EXPECT_GT(cost.bytes, 0);
    EXPECT_GE(cost.flops, 0);
  }
}

TEST_P(OperatorTest, FactorsMultiplyToTheDims) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example);
    const ShardingRule rule = op().sharding(test_case.context());
    ASSERT_EQ(rule.inputs.size(), test_case.inputs.size());
    ASSERT_EQ(rule.outputs.size(), test_case.output_types.size());
    const auto check = [&](const TensorFactors& factors, const Shape& shape) {
      ASSERT_EQ(factors.size(), shape.size());
      for (size_t d = 0; d < shape.size(); ++d) {
        int64_t product = 1;
        for (const int factor : factors[d]) {
          product *= rule.factors.at(static_cast<size_t>(factor)).size;
        }
        EXPECT_TRUE(factors[d].empty() || product == shape[d]) << "dim " << d;
      }
    };
    for (size_t i = 0; i < rule.inputs.size(); ++i) {
      if (test_case.present[i]) {
        check(rule.inputs[i], test_case.input_types[i].shape);
      } else {
        EXPECT_TRUE(rule.inputs[i].empty());
      }
    }
    for (size_t i = 0; i < rule.outputs.size(); ++i) {
      check(rule.outputs[i], test_case.output_types[i].shape);
    }
  }
}

TEST_P(OperatorTest, FastKernelEqualsReferenceKernel) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example);
    const std::vector<Tensor> expected = run_case(test_case);
    const std::vector<Tensor> actual = run_case(test_case, {.reference = false});
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], kernel_tolerance(expected[i].dtype())))
          << "output " << i;
    }
  }
}

TEST_P(OperatorTest, FastKernelInFloat64EqualsReferenceKernel) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = precise_case(op(), example);
    const std::vector<Tensor> expected = run_case(test_case);
    const std::vector<Tensor> actual = run_case(test_case, {.reference = false});
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], precise_tolerance(test_case)))
          << "output " << i;
    }
  }
}

TEST_P(OperatorTest, BitsDoNotDependOnTheOrderOfBlocks) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example);
    for (const bool reference : {true, false}) {
      const std::vector<Tensor> forward = run_case(test_case, {.reference = reference});
      const std::vector<Tensor> backward =
          run_case(test_case, {.reference = reference, .reverse_blocks = true});
      for (size_t i = 0; i < forward.size(); ++i) {
        EXPECT_TRUE(tensors_identical(backward[i], forward[i])) << "output " << i;
      }
    }
  }
}

TEST_P(OperatorTest, InPlaceEqualsOutOfPlace) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example);
    for (const Inplace& inplace : op().inplace) {
      const size_t input = static_cast<size_t>(inplace.input);
      const TensorType& output = test_case.output_types.at(static_cast<size_t>(inplace.output));
      if (inplace.always || !test_case.present.at(input) ||
          test_case.input_types[input].bytes() != output.bytes()) {
        continue;
      }
      const std::vector<Tensor> apart = run_case(test_case, {.reference = false});
      const std::vector<Tensor> together =
          run_case(test_case, {.reference = false, .alias = &inplace});
      for (size_t i = 0; i < apart.size(); ++i) {
        EXPECT_TRUE(tensors_identical(together[i], apart[i]))
            << "output " << i << " with output " << inplace.output << " over input " << input;
      }
    }
  }
}

// 16-bit floats, where the operator has them: against float32 from the same rounded inputs.
TEST_P(OperatorTest, SixteenBitFloatsFollowFloat32) {
  for (const OpExample& example : op().examples) {
    if (has_dtype_attribute(example)) {
      continue;
    }
    SCOPED_TRACE("example '" + example.name + "'");
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      std::vector<Tensor> actual;
      NodeCase narrow;
      try {
        narrow = make_case(op(), example, dtype);
        actual = run_case(narrow, {.reference = false});
      } catch (const Error& error) {
        // Refused aloud, which an operator that mixed precision lowers may not do.
        EXPECT_EQ(op().precision, PrecisionRule::kFull) << error.what();
        continue;
      }
      NodeCase wide = make_case(op(), example);
      for (size_t i = 0; i < wide.inputs.size(); ++i) {
        if (wide.present[i] && wide.input_types[i].dtype == DType::kFloat32) {
          wide.inputs[i] = narrow.inputs[i].cast(DType::kFloat32);
        }
      }
      const std::vector<Tensor> expected = run_case(wide);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(tensors_near(actual[i].cast(expected[i].dtype()),
                                 expected[i],
                                 is_floating(expected[i].dtype()) ? kernel_tolerance(dtype) : 0))
            << dtype_name(dtype) << ", output " << i;
      }
    }
  }
}

// Sets of outputs to leave out: any one, and all but any one. The first is always there, and an
// update in place is read by whoever owns the memory.
std::vector<std::vector<size_t>> droppable_outputs(const OpDef& op, size_t num_outputs) {
  std::vector<size_t> free;
  for (size_t i = 1; i < num_outputs; ++i) {
    if (std::none_of(op.inplace.begin(), op.inplace.end(), [&](const Inplace& alias) {
          return alias.always && alias.output == static_cast<int>(i);
        })) {
      free.push_back(i);
    }
  }
  std::vector<std::vector<size_t>> sets = {free};
  for (const size_t chosen : free) {
    sets.push_back({chosen});
    std::vector<size_t> others = free;
    std::erase(others, chosen);
    sets.push_back(others);
  }
  return sets;
}

TEST_P(OperatorTest, OutputsThatNobodyReadsMayBeAbsent) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase whole = make_case(op(), example);
    const std::vector<Tensor> expected = run_case(whole);
    for (const std::vector<size_t>& dropped : droppable_outputs(op(), expected.size())) {
      NodeCase part = whole;
      for (const size_t i : dropped) {
        part.drop_output(i);
      }
      for (const bool reference : {true, false}) {
        const std::vector<Tensor> actual = run_case(part, {.reference = reference});
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(!part.has_output(i) ||
                      tensors_near(actual[i], expected[i], kernel_tolerance(expected[i].dtype())))
              << "output " << i << " without " << dropped.size() << " others";
        }
      }
    }
  }
}

// Gradients of the sum of one output with respect to the named inputs; undefined where none flows.
std::vector<Tensor> gradients_of(Graph graph,
                                 ValueId output,
                                 const std::vector<std::string>& inputs,
                                 const std::map<std::string, Tensor>& feeds) {
  std::vector<ValueId> wanted, fetches;
  for (const std::string& name : inputs) {
    wanted.push_back(graph.find_value(name).value());
  }
  const ValueId ones = GraphBuilder(graph).fill(1, graph.value(output).type);
  const std::vector<ValueId> grads = differentiate(graph, {output}, {ones}, wanted);
  std::copy_if(grads.begin(), grads.end(), std::back_inserter(fetches), [](ValueId id) {
    return id != kNoValue;
  });
  const std::vector<Tensor> found = evaluate(graph, feeds, fetches);
  std::vector<Tensor> results;
  for (size_t i = 0, next = 0; i < grads.size(); ++i) {
    results.push_back(grads[i] == kNoValue ? Tensor() : found[next++]);
  }
  return results;
}

TEST_P(OperatorTest, GradientOfOneOutputNeedsNoOtherOutput) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const GraphCase whole = make_graph(make_case(op(), example, DType::kFloat64), example);
    const std::vector<ValueId> outputs = whole.graph.node(whole.node).outputs;
    std::vector<std::string> inputs;
    for (const ValueId input : whole.checked) {
      inputs.push_back(whole.graph.value(input).name);
    }
    for (size_t i = 0; op().gradient && !inputs.empty() && i < outputs.size(); ++i) {
      if (whole.graph.value(outputs[i]).type.dtype != DType::kFloat64) {
        continue;
      }
      Graph read = whole.graph;
      read.outputs() = {outputs[i]};
      const Graph part = eliminate_dead_code(read);
      const auto expected = gradients_of(read, outputs[i], inputs, whole.feeds);
      const auto actual = gradients_of(part, part.outputs()[0], inputs, whole.feeds);
      for (size_t k = 0; k < inputs.size(); ++k) {
        ASSERT_EQ(actual[k].defined(), expected[k].defined());
        EXPECT_TRUE(!expected[k].defined() || tensors_near(actual[k], expected[k], 1e-12))
            << "output " << i << ", input " << k;
      }
    }
  }
}

TEST_P(OperatorTest, GradientEqualsFiniteDifferences) {
  if (!op().gradient) {
    return;  // SaysEverythingOrRefusesAloud has seen to it that this is said
  }
  bool said = false;  // some example is checked, or says that it cannot be
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = make_case(op(), example, DType::kFloat64);
    const GraphCase graph_case = make_graph(test_case, example);
    std::vector<ValueId> outputs;
    bool precise = true;
    for (const ValueId output : graph_case.graph.node(graph_case.node).outputs) {
      const DType dtype = graph_case.graph.value(output).type.dtype;
      if (is_floating(dtype)) {
        outputs.push_back(output);
        precise = precise && dtype == DType::kFloat64;
      }
    }
    // A result in fewer bits has no derivative to find by small differences.
    const bool checkable = precise && !outputs.empty() && !graph_case.checked.empty();
    said = said || checkable || !precise || outputs.empty() ||
           example.check_gradient == std::vector<int>{-1};
    if (checkable) {
      EXPECT_TRUE(gradients_match_finite_differences(
          graph_case.graph, outputs, graph_case.checked, graph_case.feeds));
    }
  }
  EXPECT_TRUE(said) << "no example checks a gradient";
}

// f(x1 + x2) = f(x1) + f(x2) for every set of inputs that the rule calls linear.
TEST_P(OperatorTest, LinearInputsAreLinear) {
  for (const OpExample& example : op().examples) {
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase test_case = precise_case(op(), example);
    const ShardingRule rule = op().sharding(test_case.context());
    for (const std::vector<int>& set : rule.linear) {
      NodeCase first = test_case, second = test_case;
      bool usable = true;
      for (const int i : set) {
        const size_t input = static_cast<size_t>(i);
        ASSERT_LT(input, test_case.inputs.size());
        if (!test_case.present[input]) {
          continue;
        }
        const TensorType& type = test_case.input_types[input];
        usable = usable && is_floating(type.dtype);
        std::vector<double> x = test_case.inputs[input].to_double(), part = x;
        for (size_t j = 0; j < x.size(); ++j) {
          part[j] = x[j] * static_cast<double>(j % 5) / 4;
          x[j] -= part[j];
        }
        first.inputs[input] = Tensor::from(part, type.shape).cast(type.dtype);
        second.inputs[input] = Tensor::from(x, type.shape).cast(type.dtype);
      }
      if (!usable) {
        continue;
      }
      const std::vector<Tensor> whole = run_case(test_case);
      const std::vector<Tensor> a = run_case(first), b = run_case(second);
      for (size_t i = 0; i < whole.size(); ++i) {
        std::vector<double> sum = a[i].to_double();
        const std::vector<double> other = b[i].to_double();
        std::transform(sum.begin(), sum.end(), other.begin(), sum.begin(), std::plus<>());
        EXPECT_TRUE(tensors_near(Tensor::from(sum, whole[i].shape()).cast(whole[i].dtype()),
                                 whole[i],
                                 precise_tolerance(test_case)))
            << "output " << i;
      }
    }
  }
}

// Models have tensors without elements (an empty list of boxes, a batch of which a mask leaves
// nothing): they are refused, or both kernels agree on what comes of them.
TEST_P(OperatorTest, TakesTensorsWithoutElements) {
  if (is_communication(op())) {
    return;
  }
  for (const OpExample& example : op().examples) {
    for_each_empty_case(op(), example, [](const NodeCase& test_case) {
      get_op(test_case.node.op_type).cost(test_case.context());
      const std::vector<Tensor> expected = run_case(test_case);
      const std::vector<Tensor> actual = run_case(test_case, {.reference = false});
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(tensors_near(actual[i], expected[i], kernel_tolerance(expected[i].dtype())))
            << "output " << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Registry,
                         OperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
