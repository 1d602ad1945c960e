// Comparisons (to bool), logic on bools, and tests for NaN and infinity. None has a gradient.
#include "ops/comparison.h"

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F>
OpDef comparison(const char* name) {
  OpDef op = binary_op<F, Numbers::kNumeric>(name);
  op.not_differentiable = true;
  op.examples = binary_examples(-1, 1);
  OpExample integers;
  integers.name = "integers";
  integers.inputs = {{DType::kInt64, {6, 9}}, {DType::kInt64, {9}}};
  op.examples.push_back(integers);
  return op;
}

// Equal also compares bools; a bool counts as 0 or 1.
OpDef equal_op() {
  OpDef op = comparison<Equal>("Equal");
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.num_inputs() == 2 && context.input_dtype(0) == context.input_dtype(1),
                    kInvalidModel,
                    "Equal takes 2 inputs of one type");
    return {{DType::kBool, broadcast_shapes(context.input_shape(0), context.input_shape(1))}};
  };
  return op;
}

template <typename F>
OpDef predicate(const char* name) {
  OpDef op = unary_op<F>(name);
  op.not_differentiable = true;
  op.examples = {unary_example(-1, 1)};
  return op;
}

template <typename F, size_t kNumInputs>
OpDef logic(const char* name) {
  OpDef op = elementwise::broadcasting_form(name, kNumInputs, Numbers::kNumeric, true);
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    Shape shape;
    TRAINRT_REQUIRE(context.num_inputs() == kNumInputs,
                    kInvalidModel,
                    context.node().op_type,
                    " takes ",
                    kNumInputs,
                    " inputs, got ",
                    context.num_inputs());
    for (int i = 0; i < context.num_inputs(); ++i) {
      TRAINRT_REQUIRE(context.input_dtype(i) == DType::kBool,
                      kInvalidModel,
                      "input ",
                      i,
                      " of ",
                      context.node().op_type,
                      " must be bool, got ",
                      dtype_name(context.input_dtype(i)));
      shape = broadcast_shapes(shape, context.input_shape(i));
    }
    return {{DType::kBool, shape}};
  };
  op.reference_kernel = [](KernelContext& context) {
    const F functor;
    elementwise::run(context, elementwise::loop_of<bool, F, kNumInputs>(), &functor);
  };
  op.not_differentiable = true;
  OpExample example;
  example.name = "matrix";
  example.inputs.assign(kNumInputs, {DType::kBool, {6, 9}});
  example.inputs.back().shape = {9};
  op.examples = {example};
  return op;
}

const RegisterOp kEqual{equal_op()};
const RegisterOp kLess{comparison<Less>("Less")};
const RegisterOp kLessOrEqual{comparison<LessOrEqual>("LessOrEqual")};
const RegisterOp kGreater{comparison<Greater>("Greater")};
const RegisterOp kGreaterOrEqual{comparison<GreaterOrEqual>("GreaterOrEqual")};
const RegisterOp kIsNaN{predicate<IsNaN>("IsNaN")};
const RegisterOp kIsInf{predicate<IsInf>("IsInf")};
const RegisterOp kAnd{logic<And, 2>("And")};
const RegisterOp kOr{logic<Or, 2>("Or")};
const RegisterOp kXor{logic<Xor, 2>("Xor")};
const RegisterOp kNot{logic<Not, 1>("Not")};

}  // namespace

}  // namespace trainrt
