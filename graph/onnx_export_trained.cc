// The imported model with trained values put back, in inference form. The model's own protobuf is
// edited rather than written anew, so everything that training did not touch (names, opsets, doc
// strings, functions) stays as the user knows it.
//
//   * initializers and Constant nodes that were parameters or state take their current values;
//   * BatchNormalization and Dropout change to inference form by the rule of their opset, random
//     masks by onnx_random_masks;
//   * what then is read by nobody (statistics outputs, training flags) goes, training_info too;
//   * external weights are brought into the file, or into one file beside it above 2 GB.
#include <map>
#include <set>

#include "graph/base/log.h"
#include "graph/onnx_export.h"
#include "graph/onnx_model.h"
#include "graph/onnx_random_masks.h"
#include "graph/onnx_tensor.h"
#include "graph/onnx_write_file.h"

namespace trainrt {

namespace {

using CurrentValue = std::function<Tensor(const std::string& name)>;

int default_opset(const onnx::ModelProto& model) {
  for (const onnx::OperatorSetIdProto& opset : model.opset_import()) {
    if (canonical_domain(opset.domain()).empty()) {
      return static_cast<int>(opset.version());
    }
  }
  return 0;
}

// Puts `value` into `proto` in the dtype that the file declares.
void replace_data(onnx::TensorProto& proto, const Tensor& value, const std::string& name) {
  const TensorType type = tensor_type(proto, concat("'", name, "'"));
  TRAINRT_CHECK(value.shape() == type.shape,
                "trained '",
                name,
                "' is ",
                shape_string(value.shape()),
                ", in the model ",
                shape_string(type.shape));
  fill_tensor(proto, value.dtype() == type.dtype ? value : value.cast(type.dtype));
}

// ---- trained values

void put_values(onnx::GraphProto& graph, const CurrentValue& current) {
  std::map<std::string, onnx::TensorProto*> initializers;
  for (onnx::TensorProto& tensor : *graph.mutable_initializer()) {
    initializers[tensor.name()] = &tensor;
    const Tensor value = current(tensor.name());
    if (value.defined()) {
      replace_data(tensor, value, tensor.name());
    }
  }
  for (int i = 0; i < graph.node_size(); ++i) {
    onnx::NodeProto& node = *graph.mutable_node(i);
    if (node.op_type() != "Constant" || !canonical_domain(node.domain()).empty() ||
        node.output_size() != 1) {
      continue;
    }
    const Tensor value = current(node.output(0));
    if (!value.defined()) {
      continue;
    }
    node.clear_attribute();
    onnx::AttributeProto* attribute = node.add_attribute();
    attribute->set_name("value");
    attribute->set_type(onnx::AttributeProto::TENSOR);
    fill_tensor(*attribute->mutable_t(), value);
  }
}

// ---- inference form

void remove_attribute(onnx::NodeProto& node, const std::string& name) {
  for (int i = node.attribute_size(); i-- > 0;) {
    if (node.attribute(i).name() == name) {
      node.mutable_attribute()->DeleteSubrange(i, 1);
    }
  }
}

void set_flag(onnx::NodeProto& node, const std::string& name, int64_t value) {
  remove_attribute(node, name);
  onnx::AttributeProto* attribute = node.add_attribute();
  attribute->set_name(name);
  attribute->set_type(onnx::AttributeProto::INT);
  attribute->set_i(value);
}

// `renamed` receives outputs that now go by another name: new statistics are the old ones.
void infer_batch_norm(onnx::NodeProto& node,
                      int opset,
                      std::map<std::string, std::string>& renamed) {
  remove_attribute(node, "training_mode");
  if (opset < 7) {
    set_flag(node, "is_test", 1);
  }
  for (int i = 1; i < node.output_size(); ++i) {
    if (!node.output(i).empty() && node.input_size() > 4) {
      renamed[node.output(i)] = node.input(i % 2 == 1 ? 3 : 4);
    }
  }
  node.mutable_output()->DeleteSubrange(1, node.output_size() - 1);
}

void infer_dropout(onnx::NodeProto& node, int opset) {
  if (opset < 7) {
    set_flag(node, "is_test", 1);
  } else if (node.input_size() > 2) {
    node.mutable_input()->DeleteSubrange(2, node.input_size() - 2);
  }
}

// Random masks become what they are when nothing is dropped.
void settle_nodes(google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes,
                  const SettledNodes& settled) {
  for (onnx::NodeProto& node : nodes) {
    const auto it = settled.find(&node);
    if (it == settled.end()) {
      continue;
    }
    const SettledNode& form = it->second;
    node.clear_attribute();
    if (form.input >= 0) {
      const std::string kept = node.input(form.input);
      node.clear_input();
      node.add_input(kept);
      node.set_op_type("Identity");
      continue;
    }
    node.clear_input();
    node.set_op_type("Constant");
    onnx::AttributeProto* value = node.add_attribute();
    value->set_name("value");
    value->set_type(onnx::AttributeProto::TENSOR);
    fill_tensor(
        *value->mutable_t(),
        Tensor::scalar(form.value).cast(require_dtype(form.data_type, "'" + node.name() + "'")));
  }
}

void warn_of_random_nodes(const google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes) {
  for (const onnx::NodeProto& node : nodes) {
    if (draws_random_numbers(node)) {
      log_warning("the exported model still draws random numbers in node '",
                  node.name(),
                  "' (",
                  node.op_type(),
                  "): nothing in the file says how it is switched off");
    }
    for (const onnx::AttributeProto& attribute : node.attribute()) {
      warn_of_random_nodes(attribute.g().node());
    }
  }
}

void infer_nodes(google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes,
                 int opset,
                 std::map<std::string, std::string>& renamed) {
  for (onnx::NodeProto& node : nodes) {
    if (canonical_domain(node.domain()).empty()) {
      if (node.op_type() == "BatchNormalization") {
        infer_batch_norm(node, opset, renamed);
      } else if (node.op_type() == "Dropout") {
        infer_dropout(node, opset);
      }
    }
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        infer_nodes(*attribute.mutable_g()->mutable_node(), opset, renamed);
      }
    }
  }
}

void rename_inputs(google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes,
                   const std::map<std::string, std::string>& renamed) {
  for (onnx::NodeProto& node : nodes) {
    for (std::string& input : *node.mutable_input()) {
      const auto found = renamed.find(input);
      if (found != renamed.end()) {
        input = found->second;
      }
    }
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        rename_inputs(*attribute.mutable_g()->mutable_node(), renamed);
      }
    }
  }
}

// ---- what nobody reads

void collect_reads(const google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes,
                   std::set<std::string>& reads) {
  for (const onnx::NodeProto& node : nodes) {
    reads.insert(node.input().begin(), node.input().end());
    for (const onnx::AttributeProto& attribute : node.attribute()) {
      if (attribute.has_g()) {
        collect_reads(attribute.g().node(), reads);
        for (const onnx::ValueInfoProto& output : attribute.g().output()) {
          reads.insert(output.name());
        }
      }
    }
  }
}

template <typename Items, typename Keep>
void keep_if(Items& items, Keep&& keep) {
  for (int i = items.size(); i-- > 0;) {
    if (!keep(items.Get(i))) {
      items.DeleteSubrange(i, 1);
    }
  }
}

// Drops nodes, backwards, of which no output is read; then initializers and value_info.
void drop_dead(onnx::GraphProto& graph) {
  std::set<std::string> reads;
  for (const onnx::ValueInfoProto& output : graph.output()) {
    reads.insert(output.name());
  }
  std::set<std::string> defined;
  std::vector<bool> live(static_cast<size_t>(graph.node_size()), false);
  for (int i = graph.node_size(); i-- > 0;) {
    const onnx::NodeProto& node = graph.node(i);
    for (const std::string& output : node.output()) {
      live[static_cast<size_t>(i)] = live[static_cast<size_t>(i)] || reads.count(output) != 0;
    }
    if (live[static_cast<size_t>(i)]) {
      google::protobuf::RepeatedPtrField<onnx::NodeProto> one;
      *one.Add() = node;
      collect_reads(one, reads);
      defined.insert(node.output().begin(), node.output().end());
    }
  }
  for (int i = graph.node_size(); i-- > 0;) {
    if (!live[static_cast<size_t>(i)]) {
      graph.mutable_node()->DeleteSubrange(i, 1);
    }
  }
  std::set<std::string> inputs;
  for (const onnx::ValueInfoProto& input : graph.input()) {
    inputs.insert(input.name());
  }
  keep_if(*graph.mutable_initializer(), [&](const onnx::TensorProto& tensor) {
    return reads.count(tensor.name()) != 0 || inputs.count(tensor.name()) != 0;
  });
  keep_if(*graph.mutable_value_info(),
          [&](const onnx::ValueInfoProto& info) { return defined.count(info.name()) != 0; });
  // Optional second outputs that nobody reads (Dropout's mask) would keep their kernels busy.
  for (onnx::NodeProto& node : *graph.mutable_node()) {
    while (node.op_type() == "Dropout" && node.output_size() > 1 &&
           reads.count(node.output(node.output_size() - 1)) == 0) {
      node.mutable_output()->RemoveLast();
    }
  }
}

// Outputs that no node produces any more: the new statistics of BatchNormalization.
void drop_outputs(onnx::GraphProto& graph, const std::map<std::string, std::string>& renamed) {
  keep_if(*graph.mutable_output(),
          [&](const onnx::ValueInfoProto& output) { return renamed.count(output.name()) == 0; });
  TRAINRT_REQUIRE(graph.output_size() > 0,
                  kInvalidModel,
                  "all outputs of the model are training statistics; nothing is left to export");
}

// ---- where the data goes

// The file of weights, where they need one of their own.
std::unique_ptr<WeightFile> settle_data(onnx::ModelProto& model,
                                        const WeightFiles& files,
                                        const std::string& path) {
  onnx::GraphProto& graph = *model.mutable_graph();
  int64_t bytes = 0;
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    bytes += tensor_type(tensor, tensor.name()).bytes();
  }
  std::unique_ptr<WeightFile> weights;
  if (bytes > kMostInlineBytes) {
    log_info("the weights exceed what an ONNX file can hold; they go to '", path, ".weights'");
    weights = std::make_unique<WeightFile>(path, true);
  }
  for (onnx::TensorProto& tensor : *graph.mutable_initializer()) {
    if (weights == nullptr && !has_external_data(tensor) && !is_detached(tensor)) {
      continue;
    }
    const auto original = std::make_shared<const onnx::TensorProto>(tensor);
    const TensorSource source = tensor_source(original, *original, files);
    if (weights == nullptr) {
      fill_tensor(tensor, source.load());
    } else if (is_floating(tensor_type(tensor, tensor.name()).dtype)) {
      const Tensor data = source.load();
      tensor.clear_float_data();
      tensor.clear_double_data();
      tensor.clear_int32_data();
      weights->add(tensor, data.bytes(), [&data] { return data; });
    }
  }
  return weights;
}

}  // namespace

void export_trained(const OnnxModel& model,
                    const std::function<Tensor(const std::string& name)>& current,
                    const std::map<std::string, std::string>& metadata,
                    const std::string& path) {
  const OnnxModel::Impl& impl = model.impl();
  onnx::ModelProto proto = *impl.proto;
  onnx::GraphProto& graph = *proto.mutable_graph();
  proto.clear_training_info();
  const int opset = default_opset(proto);
  std::map<std::string, std::string> renamed;
  settle_nodes(*graph.mutable_node(), settle_random_masks(graph));
  infer_nodes(*graph.mutable_node(), opset, renamed);
  for (onnx::FunctionProto& function : *proto.mutable_functions()) {
    settle_nodes(*function.mutable_node(),
                 settle_random_masks(
                     function.node(), {}, {function.output().begin(), function.output().end()}));
    std::map<std::string, std::string> inside;
    infer_nodes(*function.mutable_node(), opset, inside);
    rename_inputs(*function.mutable_node(), inside);
  }
  drop_outputs(graph, renamed);
  rename_inputs(*graph.mutable_node(), renamed);
  drop_dead(graph);
  warn_of_random_nodes(graph.node());
  for (const onnx::FunctionProto& function : proto.functions()) {
    warn_of_random_nodes(function.node());
  }
  put_values(graph, current);
  set_metadata(proto, metadata);
  const std::unique_ptr<WeightFile> weights = settle_data(proto, impl.files, path);
  write_model_file(proto, path, weights.get());
}

}  // namespace trainrt
