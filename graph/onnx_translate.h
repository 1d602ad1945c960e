// ONNX nodes become nodes of a Graph, one after the other, at concrete shapes: the machine behind
// OnnxModel::bind and build_from_training_info.
//
// Since the inputs' types are known numbers, every node's output types follow as it is translated,
// and whatever depends on shapes alone is known at once: shape arithmetic never enters the graph.
//
// Each node is, in this order: given to the handler; done here (Constant, Shape, If ...); inlined
// if it calls a model-local function; upgraded by its operator's rule; taken over as it is, when we
// have the operator; expanded into its schema's function body; or else noted as unsupported. What
// depends on an unsupported node is only searched for more unsupported operators.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "graph/onnx_baked_batch.h"
#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"
#include "graph/upgrade.h"

namespace trainrt {

// A float tensor of the file whose role is not decided yet (onnx_parameters). Until then it is a
// kConstant with a source and no data, so that nothing is folded through it.
struct WeightCandidate {
  enum class Origin { kInitializer, kConstantNode };
  ValueId value = kNoValue;
  Origin origin = Origin::kInitializer;
  bool inlined = true;          // the data stands in the model file
  std::string note;             // for `inspect`
  std::string constant_reason;  // "", or why it is no parameter whatever else is known
  TensorPeek peek = nullptr;    // null: through the value's source
};

struct TranslateOptions {
  bool training = true;                     // false: BatchNorm and Dropout in inference form
  BatchRewriter::Record* record = nullptr;  // filled, or
  BatchRewriter* rewriter = nullptr;        // asked for every shape operand
};

class OnnxTranslator {
 public:
  // Returns true when it translated the node (having called set_output for what it computes).
  using Handler = std::function<bool(OnnxTranslator&, const onnx::NodeProto&)>;

  // Both must outlive the translator.
  OnnxTranslator(const OnnxModel::Impl& model, Graph& graph, TranslateOptions options);

  void set_handler(Handler handler) { handler_ = std::move(handler); }

  // Names of the top-level scope. Several graphs (main graph, then algorithm graph) may be
  // translated one after the other into it, as training_info wants.
  void define(const std::string& name, ValueId value);
  // An input of a kind we do not have: noted, with all that depends on it.
  void define_unsupported(const std::string& name, const std::string& why);
  void add_initializers(const onnx::GraphProto& graph);
  void translate(const onnx::GraphProto& graph);
  // Makes `names` the graph's outputs, each under its own name. Unsupported ones are left out.
  void set_outputs(const std::vector<std::string>& names);

  // --- For handlers, in the scope of the node at hand.
  Graph& graph() { return graph_; }
  // The value of a name; nothing when it depends on an unsupported node. Throws when unknown.
  std::optional<ValueId> find(const std::string& name);
  std::vector<ValueId> inputs(const onnx::NodeProto& node);
  static ValueId required_input(const std::vector<ValueId>& inputs, int i);  // throws when absent
  Attributes attributes(const onnx::NodeProto& node) const;
  int opset(const std::string& domain) const;
  std::string node_name(const onnx::NodeProto& node) const;  // stable, also for unnamed nodes
  void set_output(const onnx::NodeProto& node, int i, ValueId value);
  int source_index() const { return source_index_; }

  const std::vector<WeightCandidate>& candidates() const { return candidates_; }
  // Whether no node that was translated asked for this initializer of the top-level scope.
  bool is_unread(const std::string& initializer) const {
    return top_.values.count(initializer) == 0;
  }
  std::vector<UnsupportedOp> unsupported() const;
  // Whether an operator asked for the contents of this value when it was upgraded.
  bool was_read(const std::string& value_name) const { return read_.count(value_name) != 0; }

 private:
  // The names of one graph or function body. A subgraph sees those of the graph around it, a
  // function does not.
  struct Scope {
    Scope* outer = nullptr;
    std::unordered_map<std::string, ValueId> values;
    // Made into values when first read.
    std::unordered_map<std::string, const onnx::TensorProto*> initializers;
    std::unordered_map<std::string, const onnx::SparseTensorProto*> sparse_initializers;
    OpsetVersions opsets;
    // A function's attributes at this call.
    std::map<std::string, onnx::AttributeProto> attributes;
    std::shared_ptr<const void> owner;  // of the protobufs its nodes stand in
    std::string prefix;                 // of node and value names
    bool counts = true;                 // its nodes have positions of their own (source_index)
    int depth = 0;                      // of functions in functions
  };

  void translate_nodes(const google::protobuf::RepeatedPtrField<onnx::NodeProto>& nodes);
  void translate_node(const onnx::NodeProto& node);
  void dispatch(const onnx::NodeProto& node, std::vector<ValueId> inputs);
  bool has_poisoned_input(const onnx::NodeProto& node);
  bool is_known_operator(const onnx::NodeProto& node) const;
  void poison_outputs(const onnx::NodeProto& node);
  void note_unsupported(const onnx::NodeProto& node, const std::string& why);

  // onnx_translate.cc
  ValueId* lookup(const std::string& name);
  ValueId materialize(const onnx::TensorProto& tensor, const std::string& name);
  ValueId materialize(const onnx::SparseTensorProto& tensor, const std::string& name);
  ValueId add_weight(Value value, WeightCandidate::Origin origin, bool inlined);
  void upgrade(const onnx::NodeProto& node,
               const std::vector<ValueId>& inputs,
               const std::function<void(UpgradeContext&)>* rule);
  void finish(const onnx::NodeProto& node,
              std::vector<ValueId> results,
              NodeId first_node,
              ValueId first_value);
  void mark_quantization_scale(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  std::optional<Tensor> contents(ValueId value) const;
  void mark_read(ValueId value) const;

  // onnx_builtin.cc: operators that are about the graph itself or about shapes alone
  bool translate_builtin(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  void translate_constant(const onnx::NodeProto& node);
  void translate_shape(const onnx::NodeProto& node, ValueId input);
  bool translate_range(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  void translate_constant_of_shape(const onnx::NodeProto& node, ValueId shape);
  bool inference_form(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  void settle(const onnx::NodeProto& node);  // see onnx_random_masks.h
  void mark_running_statistics(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);

  // onnx_legacy.cc: forms before opset 7, which no operator's upgrade knows
  bool translate_legacy(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);

  // onnx_follow_batch.cc: see onnx_baked_batch.h
  std::vector<ValueId> follow_batch(const onnx::NodeProto& node,
                                    const std::vector<ValueId>& inputs);
  std::vector<ValueId> rewrite_shape(const onnx::NodeProto& node,
                                     const std::vector<ValueId>& inputs,
                                     size_t shape_input);
  ValueId shrink_uniform(ValueId operand);
  std::vector<ValueId> rewrite_initial_state(const onnx::NodeProto& node,
                                             const std::vector<ValueId>& inputs);
  void record_output(const onnx::NodeProto& node);

  // onnx_inline.cc: functions, function bodies of schemas, branches
  void inline_function(const onnx::NodeProto& node,
                       const std::vector<ValueId>& inputs,
                       std::shared_ptr<const onnx::FunctionProto> function,
                       OpsetVersions opsets,
                       bool of_schema);
  std::shared_ptr<const onnx::FunctionProto> schema_function(const onnx::NodeProto& node,
                                                             const std::vector<ValueId>& inputs);
  bool inline_branch(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);

  // onnx_unroll.cc: Loop and Scan
  void unroll_loop(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  void unroll_scan(const onnx::NodeProto& node, const std::vector<ValueId>& inputs);
  void open_body(const onnx::NodeProto& node, Scope& weights);
  std::vector<ValueId> run_iteration(const onnx::NodeProto& node,
                                     Scope& weights,
                                     const std::vector<ValueId>& arguments,
                                     int64_t iteration);

  // Calls `work` with `scope` as the scope of the node at hand.
  template <typename Work>
  void within(Scope& scope, Work&& work) {
    Scope* caller = scope_;
    scope_ = &scope;
    try {
      work();
    } catch (...) {
      scope_ = caller;
      throw;
    }
    scope_ = caller;
  }

  const OnnxModel::Impl& model_;
  Graph& graph_;
  const TranslateOptions options_;
  Handler handler_;
  Scope top_;
  Scope* scope_;  // of the node at hand
  int source_index_ = -1;
  int next_source_index_ = 0;
  std::vector<WeightCandidate> candidates_;
  std::vector<UnsupportedOp> unsupported_;
  mutable std::set<std::string> read_;
  std::set<std::string> output_names_;
};

}  // namespace trainrt
