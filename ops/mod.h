// What Mod and the shifts do to one element, on every device.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct Mod {
  explicit Mod(const Attributes& attributes) : fmod(attributes.get_int("fmod", 0) != 0) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0 || b == static_cast<T>(-1)) {
        return std::is_signed_v<T> || b == 0 ? T(0) : a % b;
      }
      const T r = a % b;
      return !fmod && r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
    } else {
      const T r = std::fmod(a, b);
      return !fmod && r != T(0) && ((r < T(0)) != (b < T(0))) ? r + b : r;
    }
  }
  bool fmod;
};

struct ModDivisorGrad {
  explicit ModDivisorGrad(const Attributes& attributes)
      : fmod(attributes.get_int("fmod", 0) != 0) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b, T dy) const {
    const T quotient = a / b;
    return -dy * (fmod ? std::trunc(quotient) : std::floor(quotient));
  }
  bool fmod;
};

struct ShiftLeft {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return b < T(64) ? static_cast<T>(static_cast<uint64_t>(a) << static_cast<uint64_t>(b)) : T(0);
  }
  TRAINRT_HOST_DEVICE double operator()(double a, double b) const {
    return std::ldexp(a, static_cast<int>(b));
  }
  TRAINRT_HOST_DEVICE float operator()(float a, float b) const {
    return std::ldexp(a, static_cast<int>(b));
  }
};

struct ShiftRight {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return b < T(64) ? static_cast<T>(static_cast<uint64_t>(a) >> static_cast<uint64_t>(b)) : T(0);
  }
  TRAINRT_HOST_DEVICE double operator()(double a, double b) const {
    return std::ldexp(a, -static_cast<int>(b));
  }
  TRAINRT_HOST_DEVICE float operator()(float a, float b) const {
    return std::ldexp(a, -static_cast<int>(b));
  }
};

}  // namespace trainrt
