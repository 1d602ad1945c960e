// Where tests find what they read and start.
#pragma once

#include <string>

namespace trainrt::testing {

// A file of the checkout under test, given relative to its root.
std::string source_path(const std::string& relative);

// The program under test.
std::string trainrt_binary();

// A text of 4 MB (the novels of Jane Austen), installed by `scripts/deps --tests`.
std::string austen_text();

// ONNX Runtime's Python package, to be put in PYTHONPATH; unpacked by `scripts/deps --tests`.
std::string onnxruntime_folder();

// The folder of Fashion-MNIST's four .gz files in IDX format, installed by `scripts/deps --tests`.
std::string fashion_mnist();

}  // namespace trainrt::testing
