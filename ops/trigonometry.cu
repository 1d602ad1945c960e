// CUDA kernels of the trigonometric and hyperbolic functions: the functors that the CPU runs too.
#include "ops/elementwise.cuh"
#include "ops/trigonometry.h"

namespace trainrt {

namespace {

// A function and its gradient.
template <typename F, typename G>
struct RegisterFunctionCuda {
  RegisterFunctionCuda(const char* name, const char* grad_name)
      : forward(name), backward(grad_name) {}
  RegisterUnary<F> forward;
  RegisterBinary<G> backward;
};

const RegisterFunctionCuda<Sin, SinGrad> kSin{"Sin", "SinGrad"};
const RegisterFunctionCuda<Cos, CosGrad> kCos{"Cos", "CosGrad"};
const RegisterFunctionCuda<Tan, TanGrad> kTan{"Tan", "TanGrad"};
const RegisterFunctionCuda<Asin, AsinGrad> kAsin{"Asin", "AsinGrad"};
const RegisterFunctionCuda<Acos, AcosGrad> kAcos{"Acos", "AcosGrad"};
const RegisterFunctionCuda<Atan, AtanGrad> kAtan{"Atan", "AtanGrad"};
const RegisterFunctionCuda<Sinh, SinhGrad> kSinh{"Sinh", "SinhGrad"};
const RegisterFunctionCuda<Cosh, CoshGrad> kCosh{"Cosh", "CoshGrad"};
const RegisterFunctionCuda<Asinh, AsinhGrad> kAsinh{"Asinh", "AsinhGrad"};
const RegisterFunctionCuda<Acosh, AcoshGrad> kAcosh{"Acosh", "AcoshGrad"};
const RegisterFunctionCuda<Atanh, AtanhGrad> kAtanh{"Atanh", "AtanhGrad"};

}  // namespace

}  // namespace trainrt
