// --resume: which checkpoint a run begins from, with which other settings, and what becomes of
// tensors that only one of the two trains.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "parallel/plan.h"
#include "runtime/checkpoint.h"
#include "runtime/options.h"
#include "runtime/training_job.h"

namespace trainrt {

// What makes a training what it is, by option; written into its checkpoints.
std::map<std::string, std::string> training_settings(const Options& options,
                                                     const TrainingJob& job);

// Of a plan, whether updates use gradients of the weights before (2BW): beside those settings,
// since a plan is chosen late.
void note_update_rule(const Plan& plan, std::map<std::string, std::string>& settings);
// Throws kInvalidArgument when the checkpoint was trained by the other rule.
void require_update_rule(const Checkpoint& checkpoint, const Plan& plan);

// The checkpoint to begin from; null without one. A folder that holds checkpoints is continued or
// refused: nothing is overwritten by accident. With `tell`, removes what a killed run left half
// written and says what differs from the checkpoint's settings. Throws kInvalidArgument for a
// checkpoint of another model, optimizer or seed.
std::shared_ptr<const Checkpoint> open_checkpoint(const Options& options,
                                                  const TrainingJob& job,
                                                  bool tell);

// A checkpoint against the tensors of a run.
struct TensorsOfResume {
  std::vector<std::string> carried;  // frozen now: saved again as they are
  std::set<std::string> fresh;       // not trained so far: they begin as in the model
};
// Throws kInvalidArgument when a --precision wants other dtypes.
TensorsOfResume compare_tensors(const Checkpoint& checkpoint, const TrainingJob& job);

}  // namespace trainrt
