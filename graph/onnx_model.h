// What an OnnxModel holds: the parsed, sorted and validated protobuf. For graph/onnx_* alone.
#pragma once

#include <onnx/onnx_pb.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/onnx_detached_data.h"
#include "graph/onnx_import.h"
#include "graph/onnx_random_masks.h"
#include "graph/onnx_signature.h"

namespace trainrt {

// Version of each operator set; the default domain is "" ("ai.onnx" is the same).
using OpsetVersions = std::map<std::string, int>;

std::string canonical_domain(const std::string& domain);

// (domain, name, overload) of a model-local function.
std::string function_key(const std::string& domain,
                         const std::string& name,
                         const std::string& overload);

struct OnnxModel::Impl {
  std::string path;   // of the model file; "" for text
  WeightFiles files;  // where weights are searched
  // Shared with every TensorSource that points into it; never changed once loaded.
  std::shared_ptr<const onnx::ModelProto> proto;

  OpsetVersions opsets;
  std::map<std::string, const onnx::FunctionProto*> functions;  // by function_key
  std::vector<ModelInput> inputs;  // main graph, without those that are initializers
  std::vector<std::string> outputs;
  std::map<std::string, std::string> weight_notes;  // split_merged_weights()
  ExportSignature signature;
  SettledNodes settled;  // in inference form; of the graph and of all functions
  // Warnings that a model gives once, however often it is bound.
  mutable std::atomic<bool> warned_of_baked_batch = false;
  mutable std::atomic<bool> warned_of_lost_samples = false;
  mutable std::atomic<bool> warned_of_draws = false;
  mutable std::atomic<bool> warned_of_inference = false;
  mutable std::atomic<bool> warned_of_lost_parameters = false;
  mutable std::atomic<bool> warned_of_lost_ties = false;
  mutable std::atomic<bool> warned_of_numbers = false;

  const onnx::GraphProto& graph() const { return proto->graph(); }

  // --- training_info: entry i's graphs and bindings, validated when the model was loaded.
  int num_training_infos() const { return proto->training_info_size(); }
  const onnx::GraphProto& algorithm(int i) const { return proto->training_info(i).algorithm(); }
  const onnx::GraphProto& initialization(int i) const {
    return proto->training_info(i).initialization();
  }
  // initializer name -> name of the value it takes after a step (all entries; keys are unique).
  std::map<std::string, std::string> update_bindings() const;
  // initializer name -> output of the initialization graph of entry i.
  std::map<std::string, std::string> initialization_bindings(int i) const;
};

// Fills in everything but proto, path and folder. Throws kInvalidModel.
void index_model(OnnxModel::Impl& model);

}  // namespace trainrt
