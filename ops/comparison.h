// What comparisons, logic and tests do to one element, on every device.
#pragma once

#include <limits>

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct Equal {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T a, T b) const {
    return a == b;
  }
};

struct Less {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T a, T b) const {
    return a < b;
  }
};

struct LessOrEqual {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T a, T b) const {
    return a <= b;
  }
};

struct Greater {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T a, T b) const {
    return a > b;
  }
};

struct GreaterOrEqual {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T a, T b) const {
    return a >= b;
  }
};

struct IsNaN {
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T x) const {
    return x != x;
  }
};

struct IsInf {
  explicit IsInf(const Attributes& attributes)
      : positive(attributes.get_int("detect_positive", 1) != 0),
        negative(attributes.get_int("detect_negative", 1) != 0) {}
  template <typename T>
  TRAINRT_HOST_DEVICE bool operator()(T x) const {
    const T infinity = std::numeric_limits<T>::infinity();
    return (positive && x == infinity) || (negative && x == -infinity);
  }
  bool positive, negative;
};

struct And {
  TRAINRT_HOST_DEVICE bool operator()(bool a, bool b) const { return a && b; }
};

struct Or {
  TRAINRT_HOST_DEVICE bool operator()(bool a, bool b) const { return a || b; }
};

struct Xor {
  TRAINRT_HOST_DEVICE bool operator()(bool a, bool b) const { return a != b; }
};

struct Not {
  TRAINRT_HOST_DEVICE bool operator()(bool x) const { return !x; }
};

}  // namespace trainrt
