// The learning rate of a step.
#pragma once

#include <cstdint>
#include <string>

namespace trainrt {

enum class LrScheduleKind : uint8_t { kConstant, kLinear, kCosine };

// "constant", "linear" (to zero), "cosine" (half a wave to zero). Throws kInvalidArgument.
LrScheduleKind lr_schedule_from_name(const std::string& name);

struct LrSchedule {
  LrScheduleKind kind = LrScheduleKind::kConstant;
  double peak = 1e-3;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;

  // Of step `step`, from 0: rises linearly over warmup_steps (the first step gets peak /
  // warmup_steps), then follows the kind down to the last step.
  double at(int64_t step) const;
};

}  // namespace trainrt
