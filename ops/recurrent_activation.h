// ONNX's activation functions of recurrent layers, on every device.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt::recurrent {

// One of ONNX's activation functions of recurrent layers.
struct Activation {
  enum class Kind : uint8_t {
    kTanh,
    kSigmoid,
    kRelu,
    kAffine,
    kLeakyRelu,
    kThresholdedRelu,
    kScaledTanh,
    kHardSigmoid,
    kElu,
    kSoftsign,
    kSoftplus,
  };
  Kind kind = Kind::kTanh;
  double alpha = 0, beta = 0;
};

template <typename T>
TRAINRT_HOST_DEVICE T activate(const Activation& a, T x) {
  const T alpha = static_cast<T>(a.alpha), beta = static_cast<T>(a.beta);
  switch (a.kind) {
    case Activation::Kind::kTanh:
      return vmath::tanh(x);
    case Activation::Kind::kSigmoid:
      return vmath::sigmoid(x);
    case Activation::Kind::kRelu:
      return x > T(0) ? x : T(0);
    case Activation::Kind::kAffine:
      return alpha * x + beta;
    case Activation::Kind::kLeakyRelu:
      return x >= T(0) ? x : alpha * x;
    case Activation::Kind::kThresholdedRelu:
      return x >= alpha ? x : T(0);
    case Activation::Kind::kScaledTanh:
      return alpha * vmath::tanh(beta * x);
    case Activation::Kind::kHardSigmoid:
      return alpha * x + beta < T(0) ? T(0) : alpha * x + beta > T(1) ? T(1) : alpha * x + beta;
    case Activation::Kind::kElu:
      return x >= T(0) ? x : alpha * vmath::expm1(x);
    case Activation::Kind::kSoftsign:
      return x / (T(1) + std::fabs(x));
    case Activation::Kind::kSoftplus:
      return vmath::softplus(x);
  }
  return x;
}

// The derivative, from the value y of the function.
template <typename T>
TRAINRT_HOST_DEVICE T derivative(const Activation& a, T y) {
  const T alpha = static_cast<T>(a.alpha), beta = static_cast<T>(a.beta);
  switch (a.kind) {
    case Activation::Kind::kTanh:
      return T(1) - y * y;
    case Activation::Kind::kSigmoid:
      return y * (T(1) - y);
    case Activation::Kind::kRelu:
    case Activation::Kind::kThresholdedRelu:
      return y > T(0) ? T(1) : T(0);
    case Activation::Kind::kAffine:
      return alpha;
    case Activation::Kind::kLeakyRelu:
      return y >= T(0) ? T(1) : alpha;
    case Activation::Kind::kScaledTanh:
      return beta * (alpha - y * y / alpha);
    case Activation::Kind::kHardSigmoid:
      return y > T(0) && y < T(1) ? alpha : T(0);
    case Activation::Kind::kElu:
      return y >= T(0) ? T(1) : y + alpha;
    case Activation::Kind::kSoftsign:
      return (T(1) - std::fabs(y)) * (T(1) - std::fabs(y));
    case Activation::Kind::kSoftplus:
      return T(1) - vmath::exp(-y);
  }
  return T(1);
}

}  // namespace trainrt::recurrent
