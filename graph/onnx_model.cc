// What can be said about a model before its dims are bound: inputs and their batch axes, symbols,
// versions, and a hash of the structure.
//
// The batch axis of an input is, in this order: a dim whose symbol reads like a batch ("batch",
// "batch_size", "N", "bs" ...); else axis 0 when it is symbolic and does not read like another
// thing (a sequence length, a class count); else, in a model without any symbolic dim, axis 0,
// whose size the exporter has then baked in. --batch-axis overrules all of it.
#include "graph/onnx_model.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <unordered_set>

#include "graph/onnx_tensor.h"

namespace trainrt {

std::string canonical_domain(const std::string& domain) {
  return domain == "ai.onnx" ? "" : domain;
}

std::string function_key(const std::string& domain,
                         const std::string& name,
                         const std::string& overload) {
  return canonical_domain(domain) + "::" + name + "::" + overload;
}

namespace {

std::string lower(const std::string& text) {
  std::string result = text;
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return result;
}

bool reads_like_batch(const std::string& symbol) {
  const std::string name = lower(symbol);
  static const std::set<std::string> kNames = {"n", "b", "bs", "bsz", "nbatch", "samples"};
  return kNames.count(name) != 0 || name.find("batch") != std::string::npos;
}

bool reads_like_length(const std::string& symbol) {
  const std::string name = lower(symbol);
  for (const char* part : {"seq", "len", "time", "token", "height", "width", "chan", "class"}) {
    if (name.find(part) != std::string::npos) {
      return true;
    }
  }
  static const std::set<std::string> kNames = {"s", "t", "l", "h", "w", "c"};
  return kNames.count(name) != 0;
}

int batch_axis(const ModelInput& input, bool any_symbolic) {
  for (size_t axis = 0; axis < input.dims.size(); ++axis) {
    if (input.dims[axis].size < 0 && reads_like_batch(input.dims[axis].symbol)) {
      return static_cast<int>(axis);
    }
  }
  if (input.dims.empty()) {
    return -1;
  }
  const Dim& first = input.dims[0];
  if (first.size < 0) {
    return reads_like_length(first.symbol) ? -1 : 0;
  }
  return any_symbolic ? -1 : 0;
}

ModelInput model_input(const onnx::ValueInfoProto& info) {
  ModelInput input;
  input.name = info.name();
  const onnx::TypeProto::Tensor& tensor = info.type().tensor_type();
  input.dtype = dtype_from_onnx(tensor.elem_type()).value_or(DType::kFloat32);
  for (int axis = 0; axis < tensor.shape().dim_size(); ++axis) {
    const onnx::TensorShapeProto::Dimension& dim = tensor.shape().dim(axis);
    Dim result;
    if (dim.has_dim_value() && dim.dim_value() >= 0) {
      result.size = dim.dim_value();
    } else {
      result.symbol = dim.dim_param().empty() ? concat(info.name(), ".", axis) : dim.dim_param();
    }
    input.dims.push_back(std::move(result));
  }
  return input;
}

// FNV-1a: stable over platforms and versions, and nobody attacks it.
class Hash {
 public:
  void add(const std::string& text) {
    for (const char c : text) {
      add_byte(static_cast<unsigned char>(c));
    }
    add_byte(0);
  }
  void add(int64_t number) { add(std::to_string(number)); }
  std::string hex() const {
    static const char* digits = "0123456789abcdef";
    std::string text;
    for (int shift = 60; shift >= 0; shift -= 4) {
      text += digits[(state_ >> shift) & 15u];
    }
    return text;
  }

 private:
  void add_byte(unsigned char byte) { state_ = (state_ ^ byte) * 0x100000001b3ull; }
  uint64_t state_ = 0xcbf29ce484222325ull;
};

void hash_graph(Hash& hash, const onnx::GraphProto& graph);

void hash_tensor(Hash& hash, const onnx::TensorProto& tensor) {
  hash.add(tensor.name());
  hash.add(tensor.data_type());
  for (const int64_t dim : tensor.dims()) {
    hash.add(dim);
  }
  // Integers steer shapes, so they are structure; floats are weights.
  const std::optional<DType> dtype = dtype_from_onnx(tensor.data_type());
  if (dtype && !is_floating(*dtype) && !has_external_data(tensor)) {
    hash.add(tensor.raw_data());
    for (const int64_t value : tensor.int64_data()) {
      hash.add(value);
    }
    for (const int32_t value : tensor.int32_data()) {
      hash.add(value);
    }
  }
}

void hash_node(Hash& hash, const onnx::NodeProto& node) {
  hash.add(node.name());
  hash.add(canonical_domain(node.domain()));
  hash.add(node.op_type());
  hash.add(node.overload());
  for (const std::string& input : node.input()) {
    hash.add(input);
  }
  hash.add("->");
  for (const std::string& output : node.output()) {
    hash.add(output);
  }
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    hash.add(attribute.name());
    if (attribute.has_t()) {
      hash_tensor(hash, attribute.t());
    } else if (attribute.has_g()) {
      hash_graph(hash, attribute.g());
    } else {
      hash.add(attribute.SerializeAsString());
    }
  }
}

void hash_graph(Hash& hash, const onnx::GraphProto& graph) {
  for (const onnx::ValueInfoProto& input : graph.input()) {
    hash.add(input.name());
    hash.add(input.type().SerializeAsString());
  }
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    hash_tensor(hash, tensor);
  }
  for (const onnx::NodeProto& node : graph.node()) {
    hash_node(hash, node);
  }
  for (const onnx::ValueInfoProto& output : graph.output()) {
    hash.add(output.name());
  }
}

}  // namespace

void index_model(OnnxModel::Impl& model) {
  const onnx::ModelProto& proto = *model.proto;
  for (const onnx::OperatorSetIdProto& opset : proto.opset_import()) {
    model.opsets[canonical_domain(opset.domain())] = static_cast<int>(opset.version());
  }
  for (const onnx::FunctionProto& function : proto.functions()) {
    const std::string key = function_key(function.domain(), function.name(), function.overload());
    TRAINRT_REQUIRE(model.functions.emplace(key, &function).second,
                    kInvalidModel,
                    "two functions are named '",
                    function.domain(),
                    ".",
                    function.name(),
                    "'");
  }
  std::unordered_set<std::string> initializers;
  for (const onnx::TensorProto& tensor : proto.graph().initializer()) {
    initializers.insert(tensor.name());
  }
  bool any_symbolic = false;
  for (const onnx::ValueInfoProto& info : proto.graph().input()) {
    if (initializers.count(info.name()) == 0) {
      model.inputs.push_back(model_input(info));
      for (const Dim& dim : model.inputs.back().dims) {
        any_symbolic = any_symbolic || dim.size < 0;
      }
    }
  }
  for (ModelInput& input : model.inputs) {
    input.batch_axis = batch_axis(input, any_symbolic);
  }
  for (const onnx::ValueInfoProto& output : proto.graph().output()) {
    model.outputs.push_back(output.name());
  }
  model.signature = read_signature(proto.graph());
  model.settled = settle_random_masks(proto.graph());
  for (const onnx::FunctionProto& function : proto.functions()) {
    model.settled.merge(settle_random_masks(
        function.node(), {}, {function.output().begin(), function.output().end()}));
  }
}

std::map<std::string, std::string> OnnxModel::Impl::update_bindings() const {
  std::map<std::string, std::string> bindings;
  for (const onnx::TrainingInfoProto& info : proto->training_info()) {
    for (const onnx::StringStringEntryProto& binding : info.update_binding()) {
      bindings[binding.key()] = binding.value();
    }
  }
  return bindings;
}

std::map<std::string, std::string> OnnxModel::Impl::initialization_bindings(int i) const {
  std::map<std::string, std::string> bindings;
  for (const onnx::StringStringEntryProto& binding :
       proto->training_info(i).initialization_binding()) {
    bindings[binding.key()] = binding.value();
  }
  return bindings;
}

OnnxModel::OnnxModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OnnxModel::OnnxModel(OnnxModel&&) noexcept = default;
OnnxModel& OnnxModel::operator=(OnnxModel&&) noexcept = default;
OnnxModel::~OnnxModel() = default;

const std::string& OnnxModel::path() const {
  return impl_->path;
}
const std::vector<ModelInput>& OnnxModel::inputs() const {
  return impl_->inputs;
}
const std::vector<std::string>& OnnxModel::outputs() const {
  return impl_->outputs;
}
int64_t OnnxModel::ir_version() const {
  return impl_->proto->ir_version();
}
std::string OnnxModel::producer() const {
  const onnx::ModelProto& proto = *impl_->proto;
  return proto.producer_version().empty() ? proto.producer_name()
                                          : proto.producer_name() + " " + proto.producer_version();
}
bool OnnxModel::has_training_info() const {
  return impl_->num_training_infos() > 0;
}

std::string OnnxModel::metadata(const std::string& key) const {
  for (const onnx::StringStringEntryProto& entry : impl_->proto->metadata_props()) {
    if (entry.key() == key) {
      return entry.value();
    }
  }
  return "";
}

int64_t OnnxModel::opset() const {
  const auto it = impl_->opsets.find("");
  return it == impl_->opsets.end() ? 0 : it->second;
}

std::vector<std::string> OnnxModel::symbols() const {
  std::vector<std::string> batch;
  std::vector<std::string> others;
  for (const ModelInput& input : impl_->inputs) {
    for (size_t axis = 0; axis < input.dims.size(); ++axis) {
      if (input.dims[axis].size < 0) {
        (static_cast<int>(axis) == input.batch_axis ? batch : others)
            .push_back(input.dims[axis].symbol);
      }
    }
  }
  batch.insert(batch.end(), others.begin(), others.end());
  std::vector<std::string> unique;
  for (const std::string& symbol : batch) {
    if (std::find(unique.begin(), unique.end(), symbol) == unique.end()) {
      unique.push_back(symbol);
    }
  }
  return unique;
}

std::string OnnxModel::hash() const {
  Hash hash;
  for (const auto& [domain, version] : impl_->opsets) {
    hash.add(domain);
    hash.add(version);
  }
  hash_graph(hash, impl_->graph());
  for (const onnx::FunctionProto& function : impl_->proto->functions()) {
    hash.add(function.name());
    for (const onnx::NodeProto& node : function.node()) {
      hash_node(hash, node);
    }
  }
  for (int i = 0; i < impl_->num_training_infos(); ++i) {
    hash_graph(hash, impl_->algorithm(i));
    hash_graph(hash, impl_->initialization(i));
    for (const auto& [key, value] : impl_->update_bindings()) {
      hash.add(key);
      hash.add(value);
    }
  }
  return hash.hex();
}

}  // namespace trainrt
