// Small models as ONNX text, which the importer reads like a binary file.
#pragma once

#include <string>

namespace trainrt::testing {

// x [N, 4] -> y [N, 3]: two dense layers with fixed initial weights.
std::string tiny_model();

// Trains tiny_model() with mean squared error: what every run of it needs beside the model's path.
inline constexpr const char* kTinyLoss = "mse";

}  // namespace trainrt::testing
