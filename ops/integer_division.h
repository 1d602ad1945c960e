// An integer has no quotient or remainder by zero, and no number that would say so: kernels on the
// CPU refuse it. A device cannot refuse in the middle of a step; there the result is 0.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "graph/kernel.h"

namespace trainrt {

// `kernel` of a node whose input 1 is the divisor. Throws kInvalidArgument on an integer zero.
inline Kernel without_zero_divisors(Kernel kernel) {
  return [kernel = std::move(kernel)](KernelContext& context) {
    dispatch_all(context.input_dtype(1), [&](auto tag) {
      using T = decltype(tag);
      if constexpr (std::is_integral_v<T>) {
        const T* begin = context.input<T>(1);
        const T* end = begin + num_elements(context.input_shape(1));
        const T* zero = std::find(begin, end, T(0));
        TRAINRT_REQUIRE(zero == end,
                        kInvalidArgument,
                        "node '",
                        context.node().name,
                        "' (",
                        context.node().op_type,
                        "): the integer divisor at position ",
                        zero - begin,
                        " of ",
                        shape_string(context.input_shape(1)),
                        " is 0; integers can only be divided by other numbers");
      }
    });
    kernel(context);
  };
}

}  // namespace trainrt
