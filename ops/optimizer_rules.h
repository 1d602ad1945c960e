// The arithmetic of the optimizers for one element, on every device. A rule is made once from the
// operator's constants and the step's scalars, in double, and then applied to every element; the
// operators' own files (sgd.cc, adam.cc, ...) have the formulas and papers.
#pragma once

#include <cmath>

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt::optimizer {

// What the host knows of any optimizer; each rule reads what it has.
struct Constants {
  explicit Constants(const Attributes& a)
      : beta1(a.get_float("beta1", 0)),
        beta2(a.get_float("beta2", 0)),
        eps(a.get_float("eps", 0)),
        weight_decay(a.get_float("weight_decay", 0)),
        momentum(a.get_float("momentum", 0)),
        nesterov(a.get_int("nesterov", 0) != 0) {}
  double beta1, beta2, eps, weight_decay, momentum;
  bool nesterov;
};

// What a step feeds: the last three inputs of an optimizer.
struct Scalars {
  double learning_rate = 0, grad_scale = 1, step = 1;
};

template <typename T>
struct Sgd {
  static constexpr int kStates = 0;
  TRAINRT_HOST_DEVICE Sgd(const Constants& c, const Scalars& s)
      : scale(static_cast<T>(s.grad_scale)),
        decay(static_cast<T>(c.weight_decay)),
        lr(static_cast<T>(s.learning_rate)) {}
  TRAINRT_HOST_DEVICE void operator()(T& param, T grad) const {
    param -= lr * (grad * scale + decay * param);
  }
  T scale, decay, lr;
};

template <typename T>
struct Momentum {
  static constexpr int kStates = 1;
  TRAINRT_HOST_DEVICE Momentum(const Constants& c, const Scalars& s)
      : scale(static_cast<T>(s.grad_scale)),
        decay(static_cast<T>(c.weight_decay)),
        lr(static_cast<T>(s.learning_rate)),
        momentum(static_cast<T>(c.momentum)),
        nesterov(c.nesterov) {}
  TRAINRT_HOST_DEVICE void operator()(T& param, T grad, T& buffer) const {
    const T g = grad * scale + decay * param;
    const T b = momentum * buffer + g;
    buffer = b;
    param -= lr * (nesterov ? g + momentum * b : b);
  }
  T scale, decay, lr, momentum;
  bool nesterov;
};

template <typename T>
struct Adagrad {
  static constexpr int kStates = 1;
  TRAINRT_HOST_DEVICE Adagrad(const Constants& c, const Scalars& s)
      : scale(static_cast<T>(s.grad_scale)),
        decay(static_cast<T>(c.weight_decay)),
        lr(static_cast<T>(s.learning_rate)),
        eps(static_cast<T>(c.eps)) {}
  TRAINRT_HOST_DEVICE void operator()(T& param, T grad, T& sum) const {
    const T g = grad * scale + decay * param;
    const T h = sum + g * g;
    sum = h;
    param -= lr * g / (std::sqrt(h) + eps);
  }
  T scale, decay, lr, eps;
};

template <typename T, bool kDecoupled>
struct AdamRule {
  static constexpr int kStates = 2;
  TRAINRT_HOST_DEVICE AdamRule(const Constants& c, const Scalars& s)
      : scale(static_cast<T>(s.grad_scale)),
        beta1(static_cast<T>(c.beta1)),
        beta2(static_cast<T>(c.beta2)),
        rest1(static_cast<T>(1 - c.beta1)),
        rest2(static_cast<T>(1 - c.beta2)),
        step_size(static_cast<T>(s.learning_rate / (1 - std::pow(c.beta1, s.step)))),
        v_factor(static_cast<T>(1 / std::sqrt(1 - std::pow(c.beta2, s.step)))),
        eps(static_cast<T>(c.eps)),
        keep(static_cast<T>(kDecoupled ? 1 - s.learning_rate * c.weight_decay : 1)),
        l2(static_cast<T>(kDecoupled ? 0 : c.weight_decay)) {}
  TRAINRT_HOST_DEVICE void operator()(T& param, T grad, T& first, T& second) const {
    const T p = param * keep;
    const T g = grad * scale + l2 * param;
    const T m = beta1 * first + rest1 * g;
    const T v = beta2 * second + rest2 * g * g;
    first = m;
    second = v;
    param = p - step_size * m / (std::sqrt(v) * v_factor + eps);
  }
  T scale, beta1, beta2, rest1, rest2, step_size, v_factor, eps, keep, l2;
};

template <typename T>
using Adam = AdamRule<T, false>;
template <typename T>
using AdamW = AdamRule<T, true>;

// The direction of LAMB; the parameter is only read.
template <typename T>
struct LambDirection {
  TRAINRT_HOST_DEVICE LambDirection(const Constants& c, const Scalars& s)
      : scale(static_cast<T>(s.grad_scale)),
        beta1(static_cast<T>(c.beta1)),
        beta2(static_cast<T>(c.beta2)),
        rest1(static_cast<T>(1 - c.beta1)),
        rest2(static_cast<T>(1 - c.beta2)),
        m_factor(static_cast<T>(1 / (1 - std::pow(c.beta1, s.step)))),
        v_factor(static_cast<T>(1 / (1 - std::pow(c.beta2, s.step)))),
        eps(static_cast<T>(c.eps)),
        decay(static_cast<T>(c.weight_decay)) {}
  TRAINRT_HOST_DEVICE T operator()(T param, T grad, T& first, T& second) const {
    const T g = grad * scale;
    const T m = beta1 * first + rest1 * g;
    const T v = beta2 * second + rest2 * g * g;
    first = m;
    second = v;
    return m * m_factor / (std::sqrt(v * v_factor) + eps) + decay * param;
  }
  T scale, beta1, beta2, rest1, rest2, m_factor, v_factor, eps, decay;
};

// ---- ai.onnx.preview.training ----------------------------------------------------------------

struct OnnxConstants {
  explicit OnnxConstants(const Attributes& a)
      : decay_factor(a.get_float("decay_factor", 0)),
        norm_coefficient(a.get_float("norm_coefficient", 0)),
        norm_coefficient_post(a.get_float("norm_coefficient_post", 0)),
        epsilon(a.get_float("epsilon", 0)),
        alpha(a.get_float("alpha", 0.9)),
        beta(a.get_float("beta", 0.999)),
        nesterov(a.get_string("mode", "") == "nesterov") {}
  double decay_factor, norm_coefficient, norm_coefficient_post, epsilon, alpha, beta;
  bool nesterov;
};

// r: the learning rate, t: the update count. Each returns the new tensor and changes the moments.
template <typename T>
struct OnnxAdagrad {
  static constexpr int kStates = 1;
  TRAINRT_HOST_DEVICE OnnxAdagrad(const OnnxConstants& c, double r, double t)
      : rate(static_cast<T>(r / (1 + t * c.decay_factor))),
        decay(static_cast<T>(c.norm_coefficient)),
        epsilon(static_cast<T>(c.epsilon)) {}
  TRAINRT_HOST_DEVICE T operator()(T x, T g, T& h) const {
    const T grad = decay * x + g;
    h = h + grad * grad;
    return x - rate * grad / (std::sqrt(h) + epsilon);
  }
  T rate, decay, epsilon;
};

template <typename T>
struct OnnxAdam {
  static constexpr int kStates = 2;
  TRAINRT_HOST_DEVICE OnnxAdam(const OnnxConstants& c, double r, double t)
      : rate(static_cast<T>(
            t > 0 ? r * std::sqrt(1 - std::pow(c.beta, t)) / (1 - std::pow(c.alpha, t)) : r)),
        alpha1(static_cast<T>(c.alpha)),
        alpha2(static_cast<T>(1 - c.alpha)),
        beta1(static_cast<T>(c.beta)),
        beta2(static_cast<T>(1 - c.beta)),
        decay(static_cast<T>(c.norm_coefficient)),
        keep(static_cast<T>(1 - c.norm_coefficient_post)),
        epsilon(static_cast<T>(c.epsilon)) {}
  TRAINRT_HOST_DEVICE T operator()(T x, T g, T& v, T& h) const {
    const T grad = decay * x + g;
    v = alpha1 * v + alpha2 * grad;
    h = beta1 * h + beta2 * grad * grad;
    return keep * (x - rate * v / (std::sqrt(h) + epsilon));
  }
  T rate, alpha1, alpha2, beta1, beta2, decay, keep, epsilon;
};

template <typename T>
struct OnnxMomentum {
  static constexpr int kStates = 1;
  TRAINRT_HOST_DEVICE OnnxMomentum(const OnnxConstants& c, double r, double t)
      : rate(static_cast<T>(r)),
        alpha(static_cast<T>(c.alpha)),
        beta(static_cast<T>(t > 0 ? c.beta : 1)),
        decay(static_cast<T>(c.norm_coefficient)),
        nesterov(c.nesterov) {}
  TRAINRT_HOST_DEVICE T operator()(T x, T g, T& v) const {
    const T grad = decay * x + g;
    v = alpha * v + beta * grad;
    return x - rate * (nesterov ? grad + alpha * v : v);
  }
  T rate, alpha, beta, decay;
  bool nesterov;
};

}  // namespace trainrt::optimizer
