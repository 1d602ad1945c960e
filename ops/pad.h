// Where the elements of a padded tensor come from, on every device.
#pragma once

#include <cstdint>
#include <string>

#include "graph/attribute.h"
#include "graph/base/error.h"
#include "ops/host_device.h"

namespace trainrt {

enum class PadMode : uint8_t { kConstant, kReflect, kEdge, kWrap };

inline PadMode pad_mode_of(const Attributes& attributes) {
  const std::string name = attributes.get_string("mode", "constant");
  if (name == "constant") {
    return PadMode::kConstant;
  }
  if (name == "reflect") {
    return PadMode::kReflect;
  }
  TRAINRT_REQUIRE(
      name == "edge" || name == "wrap", kInvalidModel, "unknown padding mode '", name, "'");
  return name == "edge" ? PadMode::kEdge : PadMode::kWrap;
}

// Where element i of the padded dim comes from in a dim of size n; -1: the constant.
TRAINRT_HOST_DEVICE inline int64_t pad_source(int64_t i,
                                              int64_t pad_begin,
                                              int64_t n,
                                              PadMode mode) {
  const int64_t from = i - pad_begin;
  if (from >= 0 && from < n) {
    return from;
  }
  switch (mode) {
    case PadMode::kConstant:
      return -1;
    case PadMode::kEdge:
      return from < 0 ? 0 : n - 1;
    case PadMode::kWrap:
      return ((from % n) + n) % n;
    default: {  // reflect without repeating the border: period 2 (n - 1)
      const int64_t period = n > 1 ? 2 * (n - 1) : 1;
      const int64_t phase = ((from % period) + period) % period;
      return phase < n ? phase : period - phase;
    }
  }
}

// The first place from `i` on in the padded dim that comes from element `target`: beyond the dim's
// end when there is none.
TRAINRT_HOST_DEVICE inline int64_t next_pad_place(
    int64_t i, int64_t target, int64_t pad_begin, int64_t n, PadMode mode) {
  constexpr int64_t kNone = INT64_MAX;
  // The first that differs from `place` by a multiple of `period`.
  const auto repeated = [i](int64_t place, int64_t period) {
    return i + ((place - i) % period + period) % period;
  };
  const int64_t own = pad_begin + target;
  switch (mode) {
    case PadMode::kConstant:
      return i <= own ? own : kNone;
    case PadMode::kEdge:
      if (target == n - 1 && i > own) {
        return i;
      }
      return target == 0 && i < own ? i : (i <= own ? own : kNone);
    case PadMode::kWrap:
      return repeated(own, n);
    default: {
      const int64_t period = n > 1 ? 2 * (n - 1) : 1;
      const int64_t there = repeated(own, period), back = repeated(pad_begin - target, period);
      return there < back ? there : back;
    }
  }
}

}  // namespace trainrt
