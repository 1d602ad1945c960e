// One walk from the float outputs towards the inputs finds what a gradient reaches; a second, from
// the outputs of weight-like operands backwards through data movement, finds Constant nodes that
// stand in the place of a weight.
#include "graph/onnx_parameters.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>

#include "graph/onnx_merged_weights.h"
#include "graph/onnx_weight_contents.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

bool matches(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) {
    return fnmatch(glob.c_str(), name.c_str(), 0) == 0;
  });
}

void check_globs(const char* flag,
                 const std::vector<std::string>& globs,
                 const std::vector<std::string>& names) {
  for (const std::string& glob : globs) {
    const bool found = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return fnmatch(glob.c_str(), name.c_str(), 0) == 0;
    });
    TRAINRT_REQUIRE(found,
                    kInvalidArgument,
                    flag,
                    " '",
                    glob,
                    "' matches no parameter",
                    did_you_mean(glob, names),
                    "; inspect lists them");
  }
}

// Values that a gradient of some float output reaches.
std::vector<bool> differentiable_values(const Graph& graph) {
  std::vector<bool> reached(static_cast<size_t>(graph.num_values()), false);
  const auto reach = [&](ValueId id) {
    if (id != kNoValue && is_floating(graph.value(id).type.dtype)) {
      reached[static_cast<size_t>(id)] = true;
    }
  };
  for (const ValueId output : graph.outputs()) {
    reach(output);
  }
  for (NodeId id = graph.num_nodes(); id-- > 0;) {
    const Node& node = graph.node(id);
    const bool wanted = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId output) {
      return output != kNoValue && reached[static_cast<size_t>(output)];
    });
    const OpDef* def = find_op(node.op_type);
    if (wanted && def != nullptr && !def->not_differentiable) {
      for (const ValueId input : node.inputs) {
        reach(input);
      }
    }
  }
  return reached;
}

bool moves_data(const std::string& op) {
  static const std::set<std::string> kOps = {
      "Transpose", "Reshape", "Slice", "Concat", "Split", "Cast", "Expand", "Identity"};
  return kOps.count(op) != 0;
}

bool is_weight_operand(const std::string& op, size_t input) {
  static const std::map<std::string, std::set<size_t>> kPositions = {
      {"MatMul", {0, 1}},
      {"Einsum", {0, 1, 2}},
      {"Conv", {1, 2}},
      {"ConvTranspose", {1, 2}},
      {"ConvInputGrad", {1}},  // what a ConvTranspose becomes
      {"BatchNormApply", {2, 3}},
      {"LayerNormalization", {1, 2}},
      {"RMSNormalization", {1}},
      {"InstanceNormalization", {1, 2}},
      {"GroupNorm", {1, 2}},
      {"PRelu", {1}},
      {"Gather", {0}},
      {"Recurrent", {1, 2, 3}}};
  const auto it = kPositions.find(op);
  return it != kPositions.end() && it->second.count(input) != 0;
}

bool is_scale_or_shift(const std::string& op) {
  return op == "Add" || op == "Mul" || op == "Sub" || op == "Div";
}

// Values whose data ends, unchanged but for its place, in an operand that `accepts`.
template <typename Accepts>
std::vector<bool> values_in_position(const Graph& graph, Accepts&& accepts) {
  std::vector<bool> found(static_cast<size_t>(graph.num_values()), false);
  for (NodeId id = graph.num_nodes(); id-- > 0;) {
    const Node& node = graph.node(id);
    const bool moved = moves_data(node.op_type) &&
                       std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId output) {
                         return output != kNoValue && found[static_cast<size_t>(output)];
                       });
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] != kNoValue && (moved || accepts(node.op_type, i))) {
        found[static_cast<size_t>(node.inputs[i])] = true;
      }
    }
  }
  return found;
}

class RoleAssigner {
 public:
  RoleAssigner(Graph& graph,
               const std::vector<WeightCandidate>& candidates,
               const ExportSignature& signature,
               const BindOptions& options)
      : graph_(graph),
        candidates_(candidates),
        signature_(signature),
        options_(options),
        consumers_(graph.consumers()),
        differentiable_(differentiable_values(graph)),
        weights_(values_in_position(graph, is_weight_operand)),
        scales_(values_in_position(
            graph, [](const std::string& op, size_t) { return is_scale_or_shift(op); })) {}

  std::vector<TensorReport> assign() {
    std::vector<std::string> names;
    for (const WeightCandidate& candidate : candidates_) {
      if (in_weight_position(candidate)) {
        const bool constant = candidate.origin == WeightCandidate::Origin::kConstantNode;
        (constant ? has_constant_weights_ : has_initializer_weights_) = true;
      }
      if (reached(candidate.value)) {
        names.push_back(graph_.value(candidate.value).name);
      }
    }
    check_globs("--trainable", options_.trainable, names);
    check_globs("--freeze", options_.freeze, names);
    std::vector<TensorReport> reports;
    for (const WeightCandidate& candidate : candidates_) {
      Value& value = graph_.value(candidate.value);
      TensorReport report{value.name, value.type, "", ""};
      decide(candidate, report);
      if (!candidate.note.empty()) {
        report.why += "; " + candidate.note;
      }
      apply(candidate, value, report);
      reports.push_back(std::move(report));
    }
    for (const auto& [later, earlier] : lost_ties(graph_, candidates_)) {
      for (TensorReport& report : reports) {
        if (report.name == graph_.value(later).name) {
          report.equal_to = graph_.value(earlier).name;
          report.why += concat("; has the elements of '",
                               graph_.value(earlier).name,
                               "': if the two were tied, the exporter has untied them");
        }
      }
    }
    return reports;
  }

 private:
  bool reached(ValueId id) const { return differentiable_[static_cast<size_t>(id)]; }

  bool is_used(ValueId id) const {
    return !consumers_[static_cast<size_t>(id)].empty() ||
           std::find(graph_.outputs().begin(), graph_.outputs().end(), id) !=
               graph_.outputs().end();
  }

  bool in_weight_position(const WeightCandidate& candidate) const {
    return weights_[static_cast<size_t>(candidate.value)] && reached(candidate.value);
  }

  std::string first_reader(ValueId id) const {
    const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(id)];
    return readers.empty()
               ? "a graph output"
               : concat(graph_.node(readers[0]).op_type, " '", graph_.node(readers[0]).name, "'");
  }

  std::string buffer(const WeightCandidate& candidate) const {
    return buffer_reason(
        graph_.value(candidate.value), candidate, weights_[static_cast<size_t>(candidate.value)]);
  }

  void set(TensorReport& report, const char* role, std::string why) const {
    report.role = role;
    report.why = std::move(why);
  }

  void decide(const WeightCandidate& candidate, TensorReport& report) const {
    const Value& value = graph_.value(candidate.value);
    if (value.kind == ValueKind::kState) {
      set(report, "state", value.why);
    } else if (!is_used(candidate.value)) {
      set(report, "unused", "no node on the way to an output reads it");
    } else if (!reached(candidate.value)) {
      set(report,
          "constant",
          concat("no gradient reaches it through ", first_reader(candidate.value)));
    } else if (!candidate.constant_reason.empty()) {
      set(report, "constant", candidate.constant_reason);
    } else {
      decide_by_file(candidate, report);
      decide_by_options(value.name, report);
    }
  }

  // --trainable and --freeze choose among the parameters; a full name in --trainable makes one.
  void decide_by_options(const std::string& name, TensorReport& report) const {
    const auto& trainable = options_.trainable;
    const bool named = std::find(trainable.begin(), trainable.end(), name) != trainable.end();
    if (report.role != "parameter" && !named) {
      return;
    }
    if (matches(options_.freeze, name)) {
      set(report, "frozen", "--freeze");
    } else if (!trainable.empty()) {
      const bool chosen = matches(trainable, name);
      set(report,
          chosen ? "parameter" : "frozen",
          chosen ? "--trainable" : "no --trainable names it");
    }
  }

  void decide_by_file(const WeightCandidate& candidate, TensorReport& report) const {
    const Value& value = graph_.value(candidate.value);
    const bool single = num_elements(value.type.shape) == 1;
    if (single && is_offset(candidate) && signature_.folded_from.count(value.name) != 0) {
      set(report, "constant", "a single number that the exporter folded and something is added to");
    } else if (const auto listed = signature_.role(value.name);
               listed && !may_be_unlisted(candidate)) {
      set(report,
          listed->parameter ? "parameter" : "constant",
          listed->parameter ? concat(listed->why, ", read by ", first_reader(candidate.value))
                            : listed->why);
    } else if (candidate.origin == WeightCandidate::Origin::kConstantNode) {
      decide_constant_node(candidate, report);
    } else if (single && is_made_up(value.name) &&
               !weights_[static_cast<size_t>(candidate.value)]) {
      set(report, "constant", "a single number under a name that the exporter made up");
    } else if (is_written_exponent(candidate)) {
      set(report, "constant", "a whole number that something is raised to");
    } else if (const std::string reason = buffer(candidate); !reason.empty()) {
      set(report, "constant", reason);
    } else {
      set(report,
          "parameter",
          concat("float initializer, read by ", first_reader(candidate.value)));
    }
  }

  // The 2 of a square; a learned exponent has a dim, or is no whole number to begin with.
  bool is_written_exponent(const WeightCandidate& candidate) const {
    const Value& value = graph_.value(candidate.value);
    const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(candidate.value)];
    if (!value.type.shape.empty() || !candidate.inlined ||
        !std::all_of(readers.begin(), readers.end(), [&](NodeId id) {
          const Node& node = graph_.node(id);
          return node.op_type == "Pow" && node.inputs[1] == candidate.value;
        })) {
      return false;
    }
    const double exponent = inspected_elements(value, candidate.inlined).at(0);
    return std::nearbyint(exponent) == exponent;
  }

  // Only ever added: a penalty on weights, say, that was computed when the model was exported, and
  // that would be lowered without end if it were trained.
  bool is_offset(const WeightCandidate& candidate) const {
    const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(candidate.value)];
    return graph_.value(candidate.value).type.shape.empty() &&
           std::all_of(readers.begin(), readers.end(), [&](NodeId id) {
             return graph_.node(id).op_type == "Add" || graph_.node(id).op_type == "Sub";
           });
  }

  // Something made of parameters by a tool that came after the exporter, and took them away: there
  // the list of parameters says nothing of what stands in the place of a weight.
  bool may_be_unlisted(const WeightCandidate& candidate) const {
    const Value& value = graph_.value(candidate.value);
    if (signature_.holds_all() || signature_.kinds.count(value.name) != 0 ||
        signature_.folded_from.count(value.name) != 0 ||
        !weights_[static_cast<size_t>(candidate.value)] || num_elements(value.type.shape) == 1) {
      return false;
    }
    const std::vector<double> data = inspected_elements(value, candidate.inlined);
    return std::any_of(data.begin(), data.end(), [&](double x) { return x != data[0]; });
  }

  void decide_constant_node(const WeightCandidate& candidate, TensorReport& report) const {
    const auto id = static_cast<size_t>(candidate.value);
    if (has_initializer_weights_) {
      set(report, "constant", "a Constant node's tensor in a model whose weights are initializers");
    } else if (weights_[id]) {
      set(report,
          "parameter",
          concat("Constant node in the place of a weight of ", first_reader(candidate.value)));
    } else if (has_constant_weights_ && scales_[id] && buffer(candidate).empty()) {
      set(report,
          "parameter",
          concat("Constant node in the place of a bias or scale, ",
                 first_reader(candidate.value),
                 ", in a model whose weights are Constant nodes"));
    } else {
      set(report, "constant", "a Constant node's tensor that is no weight");
    }
  }

  void apply(const WeightCandidate& candidate, Value& value, const TensorReport& report) const {
    value.why = report.why;
    if (report.role == "parameter") {
      value.kind = ValueKind::kParameter;
    } else if (report.role == "constant" && candidate.inlined) {
      value.constant = value.source.load();
    }
  }

  Graph& graph_;
  const std::vector<WeightCandidate>& candidates_;
  const ExportSignature& signature_;
  const BindOptions& options_;
  const std::vector<std::vector<NodeId>> consumers_;
  const std::vector<bool> differentiable_;
  const std::vector<bool> weights_;
  const std::vector<bool> scales_;
  bool has_constant_weights_ = false;
  bool has_initializer_weights_ = false;
};

}  // namespace

std::vector<TensorReport> assign_roles(Graph& graph,
                                       const std::vector<WeightCandidate>& candidates,
                                       const ExportSignature& signature,
                                       const BindOptions& options) {
  return RoleAssigner(graph, candidates, signature, options).assign();
}

}  // namespace trainrt
