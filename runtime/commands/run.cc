// `trainrt run` and `trainrt eval`.
#include "runtime/commands/command.h"
#include "runtime/trainer.h"

namespace trainrt {

namespace {

const RegisterCommand kRun{{
    .name = "run",
    .arguments = "MODEL.onnx",
    .summary = "train the model",
    .groups = kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions | kTraceOptions,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = [](const Options& options) { return train(options); },
    .starts_ranks = true,
}};

const RegisterCommand kEval{{
    .name = "eval",
    .arguments = "MODEL.onnx",
    .summary = "loss and accuracy on data, without training",
    .groups = kDataOptions | kPlanOptions | kFormatOptions | kOutputOptions,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = evaluate,
    .starts_ranks = true,
}};

}  // namespace

}  // namespace trainrt
