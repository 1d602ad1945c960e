// What a run is about to do, on stderr: model, data, update and plan as they were resolved, and
// what of it may surprise.
#pragma once

#include "runtime/rank_runner.h"

namespace trainrt {

void describe(const Run& run);

}  // namespace trainrt
