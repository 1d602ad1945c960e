// A Plan as ONNX's multi-device annotations, and back. Stages, degrees and placements are said in
// ONNX's own terms, which other tools read; what those terms cannot say (shares, schedule,
// recomputation ...) goes into the model's metadata as the plan's JSON.
#pragma once

#include <optional>
#include <string>

#include "graph/onnx_annotation.h"
#include "parallel/plan.h"

namespace trainrt {

DeviceAnnotation annotation_of(const Plan& plan, const OnnxModel& model);

// The plan that a model carries. One annotated by us comes back whole; from the annotations of
// others degrees, stages and the placements of weights are read, and the rest is left at "not said"
// (no shares, no devices). Nothing when the model has no annotations. Throws kInvalidModel when
// they are no plan of equal stages: stages that are not consecutive runs of nodes, devices that
// stages or shards do not divide evenly.
struct AnnotatedPlan {
  Plan plan;
  bool whole = false;  // the plan's JSON was there
};
std::optional<AnnotatedPlan> plan_of_annotation(const OnnxModel& model);

}  // namespace trainrt
