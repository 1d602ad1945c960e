// One translation of a model at given sizes, without any second thoughts about its batch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/onnx_baked_batch.h"
#include "graph/onnx_import.h"
#include "graph/onnx_model.h"

namespace trainrt {

class OnnxTranslator;

struct Binding {
  Graph graph;  // live nodes only, roles assigned; neither folded nor fused yet
  std::vector<UnsupportedOp> unsupported;
  std::vector<TensorReport> tensors;
  int64_t example_batch = 0;
  std::vector<std::string> rewritten;  // nodes into which example_batch was baked
};

// Throws kInvalidArgument for names of inputs or dims that do not exist, and bad sizes.
void check_options(const OnnxModel::Impl& model, const BindOptions& options);

// The batch size that the dims of the inputs are fixed to, if any.
std::optional<int64_t> fixed_batch(const OnnxModel::Impl& model, const BindOptions& options);

// Throws kInvalidArgument for unbound dims, kInvalidModel for shapes that disagree.
Binding translate_model(const OnnxModel::Impl& model,
                        const BindOptions& options,
                        BatchRewriter::Record* record = nullptr,
                        BatchRewriter* rewriter = nullptr);

// Checks `options`, then defines the model's inputs at their bound sizes.
void define_inputs(const OnnxModel::Impl& model,
                   const BindOptions& options,
                   OnnxTranslator& translator);

}  // namespace trainrt
