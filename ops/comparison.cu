// CUDA kernels of comparisons, logic, bitwise operators, tests and Where.
#include "ops/bitwise.h"
#include "ops/comparison.h"
#include "ops/elementwise.cuh"

namespace trainrt {

namespace {

template <typename F, size_t kNumInputs>
void logic_cuda(KernelContext& context) {
  elementwise::launch_map<elementwise::StoredInteger<uint64_t>, kNumInputs>(
      context, F{}, elementwise::loops_of(context, kNumInputs));
}

template <typename F, size_t kNumInputs>
void bitwise_cuda(KernelContext& context) {
  const BroadcastLoops loops = elementwise::loops_of(context, kNumInputs);
  elementwise::launch_map<elementwise::StoredInteger<int64_t>, kNumInputs>(context, F{}, loops);
}

// Selecting moves bits, so one kernel per element size serves every type.
template <typename Word>
struct Select {
  const bool* condition;
  const Word *a, *b;
  Word* out;
  int ndim;
  int64_t dims[kMaxDims];
  int64_t strides[3][kMaxDims];

  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    int64_t offsets[3] = {};
    int64_t rest = i;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t index = rest % dims[d];
      rest /= dims[d];
      for (int operand = 0; operand < 3; ++operand) {
        offsets[operand] += index * strides[operand][d];
      }
    }
    out[i] = condition[offsets[0]] ? a[offsets[1]] : b[offsets[2]];
  }
};

void where_cuda(KernelContext& context) {
  const BroadcastLoops loops = elementwise::loops_of(context, 3);
  dispatch_word(context.output_dtype(0), [&](auto tag) {
    using Word = decltype(tag);
    Select<Word> select{static_cast<const bool*>(context.raw_input(0)),
                        static_cast<const Word*>(context.raw_input(1)),
                        static_cast<const Word*>(context.raw_input(2)),
                        static_cast<Word*>(context.raw_output(0)),
                        loops.ndim,
                        {},
                        {}};
    for (size_t d = 0; d < static_cast<size_t>(loops.ndim); ++d) {
      select.dims[d] = loops.dims[d];
      for (size_t operand = 0; operand < 3; ++operand) {
        select.strides[operand][d] = loops.strides[operand][d];
      }
    }
    launch(context, num_elements(context.output_shape(0)), select);
  });
}

const RegisterBinary<Equal, Numbers::kNumeric> kEqual{"Equal"};
const RegisterBinary<Less, Numbers::kNumeric> kLess{"Less"};
const RegisterBinary<LessOrEqual, Numbers::kNumeric> kLessOrEqual{"LessOrEqual"};
const RegisterBinary<Greater, Numbers::kNumeric> kGreater{"Greater"};
const RegisterBinary<GreaterOrEqual, Numbers::kNumeric> kGreaterOrEqual{"GreaterOrEqual"};
const RegisterUnary<IsNaN> kIsNaN{"IsNaN"};
const RegisterUnary<IsInf> kIsInf{"IsInf"};
const RegisterCudaKernel kAnd{"And", logic_cuda<And, 2>};
const RegisterCudaKernel kOr{"Or", logic_cuda<Or, 2>};
const RegisterCudaKernel kXor{"Xor", logic_cuda<Xor, 2>};
const RegisterCudaKernel kNot{"Not", logic_cuda<Not, 1>};
const RegisterCudaKernel kBitwiseAnd{"BitwiseAnd", bitwise_cuda<BitwiseAnd, 2>};
const RegisterCudaKernel kBitwiseOr{"BitwiseOr", bitwise_cuda<BitwiseOr, 2>};
const RegisterCudaKernel kBitwiseXor{"BitwiseXor", bitwise_cuda<BitwiseXor, 2>};
const RegisterCudaKernel kBitwiseNot{"BitwiseNot", bitwise_cuda<BitwiseNot, 1>};
const RegisterCudaKernel kWhere{"Where", where_cuda};

}  // namespace

}  // namespace trainrt
