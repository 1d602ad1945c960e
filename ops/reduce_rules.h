// What reductions do with one element and with two partial results (ops/reduce.h says what a
// reducer is), on every device.
#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "ops/host_device.h"

namespace trainrt::reduce {

struct Sum {
  static constexpr bool kPlainSum = true;
  template <typename X>
  using Accumulator = X;
  template <typename A>
  TRAINRT_HOST_DEVICE static A init() {
    return A(0);
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A sum, A x) {
    return sum + x;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A merge(A a, A b) {
    return a + b;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A sum, double) {
    return sum;
  }
};

struct Mean : Sum {
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A sum, double count) {
    return sum / static_cast<A>(count);
  }
};

struct L1 : Sum {
  static constexpr bool kPlainSum = false;
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A sum, A x) {
    return sum + (x < A(0) ? A(0) - x : x);
  }
};

struct SumSquare : Sum {
  static constexpr bool kPlainSum = false;
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A sum, A x) {
    return sum + x * x;
  }
};

struct L2 : SumSquare {
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A sum, double) {
    return static_cast<A>(std::sqrt(static_cast<double>(sum)));
  }
};

struct Max {
  static constexpr bool kExact = true;
  template <typename X>
  using Accumulator = X;
  template <typename A>
  TRAINRT_HOST_DEVICE static A init() {
    return std::numeric_limits<A>::has_infinity ? -std::numeric_limits<A>::infinity()
                                                : std::numeric_limits<A>::lowest();
  }
  template <typename A>  // numbers or vectors of them
  TRAINRT_HOST_DEVICE static auto wins(A x, A largest) {
    return x > largest;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A largest, A x) {
    return wins(x, largest) | (x != x) ? x : largest;  // NaN wins and stays
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A merge(A a, A b) {
    return step(a, b);
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A largest, double) {
    return largest;
  }
};

struct Min {
  static constexpr bool kExact = true;
  template <typename X>
  using Accumulator = X;
  template <typename A>
  TRAINRT_HOST_DEVICE static A init() {
    return std::numeric_limits<A>::has_infinity ? std::numeric_limits<A>::infinity()
                                                : std::numeric_limits<A>::max();
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static auto wins(A x, A smallest) {
    return x < smallest;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A smallest, A x) {
    return wins(x, smallest) | (x != x) ? x : smallest;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A merge(A a, A b) {
    return step(a, b);
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A smallest, double) {
    return smallest;
  }
};

struct Prod {
  template <typename X>
  using Accumulator = X;
  template <typename A>
  TRAINRT_HOST_DEVICE static A init() {
    return A(1);
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A step(A product, A x) {
    return product * x;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A merge(A a, A b) {
    return a * b;
  }
  template <typename A>
  TRAINRT_HOST_DEVICE static A finish(A product, double) {
    return product;
  }
};

// log sum e^x with the running maximum taken out, so that neither end overflows.
struct LogSumExp {
  struct Running {
    double max, sum;
  };
  template <typename X>
  using Accumulator = Running;
  template <typename A>
  TRAINRT_HOST_DEVICE static A init() {
    return {-std::numeric_limits<double>::infinity(), 0};
  }
  template <typename X>
  TRAINRT_HOST_DEVICE static Running step(Running total, X element) {
    return merge(total, Running{static_cast<double>(element), 1});
  }
  TRAINRT_HOST_DEVICE static Running merge(Running a, Running b) {
    if (a.max < b.max) {
      std::swap(a, b);
    }
    // Equal maxima, infinite ones too, add up without a difference of infinities.
    a.sum += a.max == b.max ? b.sum : b.sum * std::exp(b.max - a.max);
    return a;
  }
  TRAINRT_HOST_DEVICE static double finish(Running total, double) {
    return total.max + std::log(total.sum);
  }
};

}  // namespace trainrt::reduce
