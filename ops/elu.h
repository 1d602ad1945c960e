// What Elu, Selu, Celu, Softplus, Softsign and Mish do to one element, on every device.
#pragma once

#include <cmath>

#include "graph/attribute.h"
#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

struct Elu {
  explicit Elu(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x < T(0) ? T(alpha) * vmath::expm1(x) : x;
  }
  double alpha;
};

struct EluGrad {
  explicit EluGrad(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x < T(0) ? dy * T(alpha) * vmath::exp(x) : dy;
  }
  double alpha;
};

// The defaults of Selu: Klambauer et al., "Self-Normalizing Neural Networks", as ONNX rounds them.
struct SeluConstants {
  explicit SeluConstants(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 1.67326319217681884765625)),
        gamma(attributes.get_float("gamma", 1.05070102214813232421875)) {}
  double alpha, gamma;
};

struct Selu : SeluConstants {
  using SeluConstants::SeluConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return T(gamma) * (x > T(0) ? x : T(alpha) * vmath::expm1(x));
  }
};

struct SeluGrad : SeluConstants {
  using SeluConstants::SeluConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return T(gamma) * dy * (x > T(0) ? T(1) : T(alpha) * vmath::exp(x));
  }
};

struct Celu {
  explicit Celu(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x < T(0) ? T(alpha) * vmath::expm1(x / T(alpha)) : x;
  }
  double alpha;
};

struct CeluGrad {
  explicit CeluGrad(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x < T(0) ? dy * vmath::exp(x / T(alpha)) : dy;
  }
  double alpha;
};

struct Softplus {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::softplus(x);
  }
};

struct SoftplusGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return dy * vmath::sigmoid(x);
  }
};

struct Softsign {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x / (T(1) + std::fabs(x));
  }
};

struct SoftsignGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T d = T(1) + std::fabs(x);
    return dy / (d * d);
  }
};

struct Mish {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x * vmath::tanh(vmath::softplus(x));
  }
};

struct MishGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T t = vmath::tanh(vmath::softplus(x));
    return dy * (t + x * (T(1) - t * t) * vmath::sigmoid(x));
  }
};

}  // namespace trainrt
