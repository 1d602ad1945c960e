// What must be equal on all processes of a run, so that a difference is found before training.
#pragma once

#include "parallel/plan.h"
#include "parallel/rendezvous.h"
#include "runtime/options.h"
#include "runtime/training_job.h"

namespace trainrt {

// Model, options, data, the step to resume from and each field of the plan. Left out is what may
// differ by host: paths and threads.
Facts start_facts(const Options& options,
                  const TrainingJob& job,
                  const Plan& plan,
                  int64_t first_step);

}  // namespace trainrt
