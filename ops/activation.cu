// CUDA kernels of the activations: the functors that the CPU runs too.
#include "ops/elementwise.cuh"
#include "ops/elu.h"
#include "ops/gelu.h"
#include "ops/hard_sigmoid.h"
#include "ops/relu.h"
#include "ops/swish.h"
#include "ops/tanh.h"

namespace trainrt {

namespace {

// The form of Gelu is an attribute.
template <typename Exact, typename Approximate, size_t kNumInputs>
void gelu_cuda(KernelContext& context) {
  if (context.attributes().get_string("approximate", "none") == "tanh") {
    elementwise::run_cuda<kNumInputs, Numbers::kFloating>(context, Approximate{});
  } else {
    elementwise::run_cuda<kNumInputs, Numbers::kFloating>(context, Exact{});
  }
}

template <typename Exact, typename Approximate, size_t kNumInputs>
FusedFunctor gelu_functor(const Attributes& attributes) {
  return attributes.get_string("approximate", "none") == "tanh"
             ? fused_functor<Approximate, kNumInputs>(attributes)
             : fused_functor<Exact, kNumInputs>(attributes);
}

const RegisterUnary<Relu, Numbers::kNumeric> kRelu{"Relu"};
const RegisterBinary<ReluGrad> kReluGrad{"ReluGrad"};
const RegisterUnary<LeakyRelu> kLeakyRelu{"LeakyRelu"};
const RegisterBinary<LeakyReluGrad> kLeakyReluGrad{"LeakyReluGrad"};
const RegisterUnary<ThresholdedRelu> kThresholdedRelu{"ThresholdedRelu"};
const RegisterBinary<ThresholdedReluGrad> kThresholdedReluGrad{"ThresholdedReluGrad"};
const RegisterBinary<PRelu> kPRelu{"PRelu"};
const RegisterTernary<PReluInputGrad> kPReluInputGrad{"PReluInputGrad"};
const RegisterBinary<PReluSlopeGrad> kPReluSlopeGrad{"PReluSlopeGrad"};
const RegisterUnary<Elu> kElu{"Elu"};
const RegisterBinary<EluGrad> kEluGrad{"EluGrad"};
const RegisterUnary<Selu> kSelu{"Selu"};
const RegisterBinary<SeluGrad> kSeluGrad{"SeluGrad"};
const RegisterUnary<Celu> kCelu{"Celu"};
const RegisterBinary<CeluGrad> kCeluGrad{"CeluGrad"};
const RegisterUnary<Softplus> kSoftplus{"Softplus"};
const RegisterBinary<SoftplusGrad> kSoftplusGrad{"SoftplusGrad"};
const RegisterUnary<Softsign> kSoftsign{"Softsign"};
const RegisterBinary<SoftsignGrad> kSoftsignGrad{"SoftsignGrad"};
const RegisterUnary<Mish> kMish{"Mish"};
const RegisterBinary<MishGrad> kMishGrad{"MishGrad"};
const RegisterCudaKernel kGelu{"Gelu", gelu_cuda<GeluErf, GeluTanh, 1>};
const RegisterCudaKernel kGeluGrad{"GeluGrad", gelu_cuda<GeluErfGrad, GeluTanhGrad, 2>};
const RegisterFusedFunctor kFusedGelu{"Gelu", gelu_functor<GeluErf, GeluTanh, 1>};
const RegisterFusedFunctor kFusedGeluGrad{"GeluGrad", gelu_functor<GeluErfGrad, GeluTanhGrad, 2>};
const RegisterUnary<Swish> kSwish{"Swish"};
const RegisterBinary<SwishGrad> kSwishGrad{"SwishGrad"};
const RegisterUnary<HardSigmoid> kHardSigmoid{"HardSigmoid"};
const RegisterBinary<HardSigmoidGrad> kHardSigmoidGrad{"HardSigmoidGrad"};
const RegisterUnary<HardSwish> kHardSwish{"HardSwish"};
const RegisterBinary<HardSwishGrad> kHardSwishGrad{"HardSwishGrad"};
const RegisterUnary<Shrink, Numbers::kNumeric> kShrink{"Shrink"};
const RegisterBinary<ShrinkGrad> kShrinkGrad{"ShrinkGrad"};
const RegisterUnary<Tanh> kTanh{"Tanh"};
const RegisterBinary<TanhGrad> kTanhGrad{"TanhGrad"};
const RegisterUnary<Sigmoid> kSigmoid{"Sigmoid"};
const RegisterBinary<SigmoidGrad> kSigmoidGrad{"SigmoidGrad"};
const RegisterUnary<Erf> kErf{"Erf"};
const RegisterBinary<ErfGrad> kErfGrad{"ErfGrad"};

}  // namespace

}  // namespace trainrt
