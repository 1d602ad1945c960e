#include "runtime/lr_schedule.h"

#include <algorithm>
#include <cmath>

#include "graph/base/error.h"

namespace trainrt {

LrScheduleKind lr_schedule_from_name(const std::string& name) {
  if (name == "constant") {
    return LrScheduleKind::kConstant;
  }
  if (name == "linear") {
    return LrScheduleKind::kLinear;
  }
  if (name == "cosine") {
    return LrScheduleKind::kCosine;
  }
  TRAINRT_FAIL(kInvalidArgument,
               "--lr-schedule is '",
               name,
               "'; wanted constant, linear or cosine",
               did_you_mean(name, {"constant", "linear", "cosine"}));
}

double LrSchedule::at(int64_t step) const {
  if (step < warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  const double span = static_cast<double>(std::max<int64_t>(1, total_steps - warmup_steps));
  const double done = std::min(1.0, static_cast<double>(step - warmup_steps) / span);
  switch (kind) {
    case LrScheduleKind::kLinear:
      return peak * (1 - done);
    case LrScheduleKind::kCosine:
      return peak * 0.5 * (1 + std::cos(M_PI * done));
    default:
      return peak;
  }
}

}  // namespace trainrt
