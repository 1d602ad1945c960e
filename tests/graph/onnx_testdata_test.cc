// The packaged ONNX test data: every model loads; each either binds and then computes the expected
// outputs, or is refused because an operator or element type is missing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include "graph/base/log.h"
#include "graph/evaluator.h"
#include "graph/onnx_import.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> packaged_models() {
  std::vector<fs::path> paths;
  const fs::path root = "/usr/share/libonnx-testdata/data";
  if (fs::is_directory(root)) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
      if (entry.path().extension() == ".onnx") {
        paths.push_back(entry.path());
      }
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// input_0.pb ... of the first data set; nothing when one is no tensor of a type we have.
using Infos = google::protobuf::RepeatedPtrField<onnx::ValueInfoProto>;
std::optional<std::vector<onnx::TensorProto>> read_tensors(const fs::path& model,
                                                           const std::string& kind,
                                                           const Infos& infos) {
  std::vector<onnx::TensorProto> tensors;
  for (const onnx::ValueInfoProto& info : infos) {
    const onnx::TypeProto& type = info.type();
    // bfloat16 is written as uint16 in this data.
    if (!type.has_tensor_type() || !dtype_from_onnx(type.tensor_type().elem_type()) ||
        type.tensor_type().elem_type() == onnx::TensorProto::BFLOAT16) {
      return std::nullopt;
    }
  }
  const fs::path folder = model.parent_path() / "test_data_set_0";
  for (int i = 0;; ++i) {
    std::ifstream in(folder / (kind + "_" + std::to_string(i) + ".pb"), std::ios::binary);
    if (!in.good()) {
      return tensors;
    }
    onnx::TensorProto tensor;
    if (!tensor.ParseFromIstream(&in) || !dtype_from_onnx(tensor.data_type())) {
      return std::nullopt;
    }
    tensors.push_back(std::move(tensor));
  }
}

Tensor tensor_of(const onnx::TensorProto& proto) {
  return tensor_source(nullptr, proto, {}).load().clone();
}

// Expected outputs are draws of another generator (or, for Dropout before opset 12, those of an
// inference): such a model must bind and run, its outputs are not compared. Nor are those of
// test_adam_multiple, which were computed with an epsilon of 0.01 that the model does not state
// (with it our result is the expected one).
bool has_other_outputs(const std::string& path) {
  for (const char* name : {"test_adam_multiple",
                           "test_bernoulli",
                           "test_training_dropout_default",
                           "test_training_dropout/",
                           "test_training_dropout_mask",
                           "test_dropout_default_old",
                           "test_dropout_random_old"}) {
    if (path.find(name) != std::string::npos) {
      return true;
    }
  }
  return false;
}

// How many inputs stay inputs: what an operator wants as a number must be known at import, but
// these models feed it, so it is tried with fewer and fewer.
enum class Fed { kAll, kFloats, kFirst, kNone };

struct Bound {
  Graph graph;
  std::map<std::string, Tensor> feeds;
};

Bound bind_with(const OnnxModel& model, const std::vector<onnx::TensorProto>& data, Fed fed) {
  onnx::ModelProto proto = *model.impl().proto;
  onnx::GraphProto& graph = *proto.mutable_graph();
  Bound bound;
  BindOptions options;
  options.fuse = false;
  std::set<std::string> initializers;
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    initializers.insert(tensor.name());
  }
  size_t next = 0;
  for (onnx::ValueInfoProto& input : *graph.mutable_input()) {
    if (initializers.count(input.name()) != 0 || next >= data.size()) {
      continue;
    }
    const onnx::TensorProto& tensor = data[next];
    const Tensor value = tensor_of(tensor);
    const bool keep = fed == Fed::kAll || (fed == Fed::kFloats && is_floating(value.dtype())) ||
                      (fed == Fed::kFirst && next == 0);
    ++next;
    if (keep) {
      onnx::TensorShapeProto* shape = input.mutable_type()->mutable_tensor_type()->mutable_shape();
      shape->clear_dim();
      for (const int64_t dim : value.shape()) {
        shape->add_dim()->set_dim_value(dim);
      }
      options.batch_axes[input.name()] = -1;
      bound.feeds[input.name()] = value;
    } else {
      onnx::TensorProto* constant = graph.add_initializer();
      *constant = tensor;
      constant->set_name(input.name());
    }
  }
  proto.set_ir_version(std::max<int64_t>(proto.ir_version(), 4));
  const fs::path path =
      fs::temp_directory_path() / ("onnx_testdata_" + std::to_string(::getpid()) + ".onnx");
  std::ofstream(path, std::ios::binary) << proto.SerializeAsString();
  const OnnxModel changed = OnnxModel::load(path.string());
  fs::remove(path);
  bound.graph = changed.bind(options);
  return bound;
}

// "" when equal within the bounds of ONNX's own backend tests.
std::string difference(const Tensor& actual, const Tensor& expected) {
  if (actual.shape() != expected.shape() || actual.dtype() != expected.dtype()) {
    return concat("is ",
                  dtype_name(actual.dtype()),
                  shape_string(actual.shape()),
                  ", wanted ",
                  dtype_name(expected.dtype()),
                  shape_string(expected.shape()));
  }
  const std::vector<double> a = actual.to_double();
  const std::vector<double> b = expected.to_double();
  for (size_t i = 0; i < a.size(); ++i) {
    const bool equal = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])) ||
                       std::abs(a[i] - b[i]) <= 1e-5 + 1e-3 * std::abs(b[i]);
    if (!equal) {
      return concat("element ", i, " is ", a[i], ", wanted ", b[i]);
    }
  }
  return "";
}

std::vector<std::string> differences(const Bound& bound,
                                     const std::vector<onnx::TensorProto>& expected) {
  EvaluateOptions options;
  options.reference_kernels = false;
  const std::vector<Tensor> outputs =
      evaluate(bound.graph, bound.feeds, bound.graph.outputs(), options);
  std::vector<std::string> found;
  for (size_t i = 0; i < std::min(outputs.size(), expected.size()); ++i) {
    const std::string text = difference(outputs[i], tensor_of(expected[i]));
    if (!text.empty()) {
      found.push_back(concat("output ", i, " ", text));
    }
  }
  return found;
}

// "ReduceMax" of "...:\n  ReduceMax (opset 13), 1 node: ...".
std::string missing_operator(const std::string& refusal) {
  const size_t start = refusal.find("\n  ");
  return start == std::string::npos
             ? refusal
             : refusal.substr(start + 3, refusal.find(' ', start + 3) - start - 3);
}

TEST(OnnxTestDataTest, EveryModelIsComputedOrRefusedForANamedReason) {
  const std::vector<fs::path> paths = packaged_models();
  if (paths.empty()) {
    GTEST_SKIP() << "libonnx-testdata is not installed";
  }
  EXPECT_GE(paths.size(), 1072u);
  set_log_level(LogLevel::kSilent);
  std::map<std::string, int> missing;
  int computed = 0;
  int not_tensors = 0;
  for (const fs::path& path : paths) {
    SCOPED_TRACE(path.string());
    try {
      const OnnxModel model = OnnxModel::load(path.string());
      const auto inputs = read_tensors(path, "input", model.impl().graph().input());
      const auto expected = read_tensors(path, "output", model.impl().graph().output());
      if (!inputs || !expected) {
        ++not_tensors;
        continue;
      }
      std::string refusal;
      bool done = false;
      for (const Fed fed : {Fed::kAll, Fed::kFloats, Fed::kFirst, Fed::kNone}) {
        try {
          const Bound bound = bind_with(model, *inputs, fed);
          for (const std::string& text : differences(bound, *expected)) {
            if (!has_other_outputs(path.string())) {
              ADD_FAILURE() << text;
            }
          }
          done = true;
          break;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
          refusal = error.message();
        }
      }
      computed += done ? 1 : 0;
      if (!done) {
        ++missing[missing_operator(refusal)];
      }
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  set_log_level(LogLevel::kInfo);
  EXPECT_GE(computed, 971);
  std::cout << computed << " of " << paths.size() << " are computed as expected, " << not_tensors
            << " are not about tensors; refused for want of:";
  for (const auto& [op, count] : missing) {
    std::cout << " " << op << " " << count << ";";
  }
  std::cout << std::endl;
}

}  // namespace
}  // namespace trainrt
