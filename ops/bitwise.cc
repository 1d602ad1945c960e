// BitwiseAnd, BitwiseOr, BitwiseXor and BitwiseNot, of integers alone.
#include "ops/bitwise.h"

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F, size_t kNumInputs>
OpDef bitwise_op(const char* name) {
  OpDef op = elementwise::broadcasting_form(name, kNumInputs, Numbers::kNumeric, false);
  op.infer_types = [infer = op.infer_types](const OpContext& context) {
    const DType dtype = context.input_dtype(0);
    TRAINRT_REQUIRE(!is_floating(dtype) && dtype != DType::kBool,
                    kInvalidModel,
                    context.node().op_type,
                    " wants integers, got ",
                    dtype_name(dtype));
    return infer(context);
  };
  op.reference_kernel = [](KernelContext& context) {
    const F functor;
    const DType dtype = context.input_dtype(0);
    const bool is_unsigned = dtype == DType::kUInt8 || dtype == DType::kUInt16 ||
                             dtype == DType::kUInt32 || dtype == DType::kUInt64;
    elementwise::run(context,
                     is_unsigned ? elementwise::loop_of<uint64_t, F, kNumInputs>()
                                 : elementwise::loop_of<int64_t, F, kNumInputs>(),
                     &functor);
  };
  op.not_differentiable = true;
  OpExample example;
  example.name = "matrix";
  example.inputs.assign(kNumInputs, {DType::kUInt8, {6, 9}});
  example.inputs.back().shape = {9};
  op.examples = {example};
  return op;
}

const RegisterOp kBitwiseAnd{bitwise_op<BitwiseAnd, 2>("BitwiseAnd")};
const RegisterOp kBitwiseOr{bitwise_op<BitwiseOr, 2>("BitwiseOr")};
const RegisterOp kBitwiseXor{bitwise_op<BitwiseXor, 2>("BitwiseXor")};
const RegisterOp kBitwiseNot{bitwise_op<BitwiseNot, 1>("BitwiseNot")};

}  // namespace

}  // namespace trainrt
