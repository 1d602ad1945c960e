// CUDA kernels of arithmetic and rounding: the functors that the CPU runs too.
#include "ops/add.h"
#include "ops/clip.h"
#include "ops/elementwise.cuh"
#include "ops/exp.h"
#include "ops/min_max.h"
#include "ops/mod.h"
#include "ops/mul.h"
#include "ops/neg.h"
#include "ops/pow.h"
#include "ops/round.h"
#include "ops/running_average.h"

namespace trainrt {

namespace {

const RegisterBinary<Add, Numbers::kNumeric> kAdd{"Add"};
const RegisterBinary<Sub, Numbers::kNumeric> kSub{"Sub"};
const RegisterBinary<Mul, Numbers::kNumeric> kMul{"Mul"};
const RegisterBinary<Div, Numbers::kNumeric> kDiv{"Div"};
const RegisterUnary<Neg, Numbers::kNumeric> kNeg{"Neg"};
const RegisterUnary<Abs, Numbers::kNumeric> kAbs{"Abs"};
const RegisterBinary<AbsGrad> kAbsGrad{"AbsGrad"};
const RegisterUnary<Sign, Numbers::kNumeric> kSign{"Sign"};
const RegisterUnary<Exp> kExp{"Exp"};
const RegisterUnary<Log> kLog{"Log"};
const RegisterUnary<Sqrt> kSqrt{"Sqrt"};
const RegisterBinary<SqrtGrad> kSqrtGrad{"SqrtGrad"};
const RegisterUnary<Reciprocal> kReciprocal{"Reciprocal"};
const RegisterBinary<ReciprocalGrad> kReciprocalGrad{"ReciprocalGrad"};
const RegisterBinary<Pow, Numbers::kNumeric> kPow{"Pow"};
const RegisterBinary<PowScalarGrad> kPowScalarGrad{"PowScalarGrad"};
const RegisterTernary<PowInputGrad> kPowInputGrad{"PowInputGrad"};
const RegisterTernary<PowExponentGrad> kPowExponentGrad{"PowExponentGrad"};
const RegisterUnary<Floor> kFloor{"Floor"};
const RegisterUnary<Ceil> kCeil{"Ceil"};
const RegisterUnary<Round> kRound{"Round"};
const RegisterUnary<Clip, Numbers::kNumeric> kClip{"Clip"};
const RegisterBinary<ClipGrad> kClipGrad{"ClipGrad"};
const RegisterBinary<Mod, Numbers::kNumeric> kMod{"Mod"};
const RegisterTernary<ModDivisorGrad> kModDivisorGrad{"ModDivisorGrad"};
const RegisterBinary<ShiftLeft, Numbers::kNumeric> kShiftLeft{"ShiftLeft"};
const RegisterBinary<ShiftRight, Numbers::kNumeric> kShiftRight{"ShiftRight"};
const RegisterBinary<Min, Numbers::kNumeric> kMin{"Min"};
const RegisterBinary<Max, Numbers::kNumeric> kMax{"Max"};
const RegisterTernary<MinGrad> kMinGrad{"MinGrad"};
const RegisterTernary<MaxGrad> kMaxGrad{"MaxGrad"};
const RegisterBinary<RunningAverage> kRunningAverage{"RunningAverage"};

}  // namespace

}  // namespace trainrt
