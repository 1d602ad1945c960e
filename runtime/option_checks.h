// What no single option can tell: that two contradict each other, that one has no effect beside
// another, or that an output would replace an input. All before any work is done.
#pragma once

#include <string>
#include <vector>

#include "graph/onnx_import.h"
#include "parallel/plan.h"
#include "runtime/options.h"

namespace trainrt {

// Throws kInvalidArgument naming both options; of `run` and `eval`.
void check_flags(const Options& options);

// Throws kInvalidArgument for --format html where there is no such form, and for an output file
// that is an input, or another output, under whatever name; kIo for one that cannot be written.
void check_files(const std::string& command, const Options& options);

// The same for the files that the model's weights lie in, which only the model names.
void check_weight_files(const Options& options, const OnnxModel& model);

// Options given on the command line, of those that train, which a model's own training_info makes
// ineffective; `reads_learning_rate`: its optimizer takes the rate from outside. Throws
// kInvalidArgument naming the first.
void refuse_beside_training_info(const Options& options, bool reads_learning_rate);

// Settings of fp16's loss scale, given on the command line, at another precision.
void check_loss_scaling(const Options& options, const std::string& precision);

// `eval` of no step has no result.
void check_eval_length(const Options& options);

// Makes the checkpoint folder. Throws kIo when it or another file that a run is to write could not
// be written: told before the work, not after it.
void check_outputs(const Options& options);

// Says which flags that pin part of a plan change nothing in the one that was made of them.
void warn_of_idle_pins(const Options& options, const Plan& plan);

}  // namespace trainrt
