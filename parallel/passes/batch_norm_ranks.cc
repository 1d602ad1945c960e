#include "parallel/passes/batch_norm_ranks.h"

#include <algorithm>

#include "parallel/passes/node_inserter.h"
#include "parallel/program.h"

namespace trainrt {

namespace {

// The running averages that lead from `update`'s target to its new value: one for each use of the
// BatchNormalization, the first use first.
std::vector<NodeId> averages_of(const Graph& graph, const StateUpdate& update, bool may_skip) {
  std::vector<NodeId> result;
  for (ValueId at = update.new_value; at != update.target;) {
    const NodeId id = graph.value(at).producer;
    const Node* node = id == kNoNode ? nullptr : &graph.node(id);
    TRAINRT_REQUIRE(node != nullptr && node->op_type == "RunningAverage",
                    kInfeasiblePlan,
                    "state '",
                    graph.value(update.target).name,
                    "' is changed within the micro-batch by a ",
                    node == nullptr ? "copy" : node->op_type,
                    may_skip ? ", which a step that fp16 skips could not take back; use "
                               "--precision bf16 or fp32"
                             : ", which data ranks cannot agree on; use one data rank");
    TRAINRT_REQUIRE(result.empty() || node->attributes == graph.node(result[0]).attributes,
                    kUnsupported,
                    "nodes '",
                    node->name,
                    "' and '",
                    graph.node(result[0]).name,
                    "' average '",
                    graph.value(update.target).name,
                    "' with different momentums, which one device alone can do in turn; give both "
                    "one momentum, or use --devices cpu",
                    may_skip ? " --precision fp32" : "");
    result.push_back(id);
    at = node->inputs[0];
  }
  std::reverse(result.begin(), result.end());
  return result;
}

// Makes what optimizers multiply gradients by: not finite where the step is skipped.
NodeId grad_scale_node(const Graph& graph) {
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    if (graph.node(id).op_type == "ClipScale") {
      return id;
    }
  }
  return kNoNode;
}

// What one micro-batch found, in the order of `averages`: of one use as it is, of several [n, ...].
ValueId found_in_micro_batch(NodeInserter& inserter, const std::vector<NodeId>& averages) {
  Graph& graph = inserter.graph();
  const NodeId last = averages.back();
  if (averages.size() == 1) {
    return graph.node(last).inputs[1];
  }
  std::vector<ValueId> rows;
  for (const NodeId id : averages) {
    const Node average = graph.node(id);
    Shape shape = graph.value(average.inputs[1]).type.shape;
    shape.insert(shape.begin(), 1);
    rows.push_back(inserter.after(last,
                                  average.region,
                                  "Reshape",
                                  {average.inputs[1]},
                                  {{"shape", shape}},
                                  average.name + "/row"));
  }
  const Node average = graph.node(last);
  return inserter.after(
      last, average.region, "Concat", rows, {{"axis", int64_t{0}}}, average.name + "/rows");
}

}  // namespace

bool shares_running_averages(const Graph& graph) {
  return std::any_of(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
    const NodeId before =
        node.op_type == "RunningAverage" ? graph.value(node.inputs[0]).producer : kNoNode;
    return before != kNoNode && graph.node(before).op_type == "RunningAverage";
  });
}

TrainingGraph fold_running_averages(TrainingGraph lowered,
                                    const std::vector<std::vector<MicroBatchCut>>& ranks,
                                    int data_rank,
                                    bool may_skip) {
  if (lowered.graph.values_of_kind(ValueKind::kState).empty()) {
    return lowered;
  }
  std::vector<int64_t> counts;
  int64_t num_micro_batches = 0;
  for (const std::vector<MicroBatchCut>& cuts : ranks) {
    counts.push_back(static_cast<int64_t>(cuts.size()));
    num_micro_batches += counts.back();
  }
  NodeInserter inserter(std::move(lowered));
  Graph& graph = inserter.graph();
  const NodeId scale = grad_scale_node(graph);
  TRAINRT_CHECK(!may_skip || scale != kNoNode);
  std::vector<StateUpdate> notes;
  for (StateUpdate& update : graph.updates()) {
    const NodeId id = graph.value(update.new_value).producer;
    if (graph.value(update.target).kind != ValueKind::kState || id == kNoNode ||
        graph.node(id).region == Region::kUpdate) {
      continue;
    }
    const std::vector<NodeId> averages = averages_of(graph, update, may_skip);
    const Node average = graph.node(id);
    const std::string name = graph.value(update.target).name;
    const ValueId row = found_in_micro_batch(inserter, averages);
    Value rows;
    rows.name = graph.unique_value_name(name + ".rows");
    rows.type = graph.value(row).type;
    rows.type.shape.insert(rows.type.shape.begin(), counts[static_cast<size_t>(data_rank)]);
    rows.kind = ValueKind::kGradient;  // as gradients: collected in a step, meaningless after it
    const ValueId target = graph.add_value(std::move(rows));
    const ValueId micro_batch = micro_batch_input(graph);
    const ValueId noted = inserter.after(
        id, average.region, "StoreRow", {target, row, micro_batch}, {}, average.name + "/note");
    ValueId all = noted;
    if (ranks.size() > 1) {
      all = inserter.after(id,
                           Region::kUpdate,
                           comm_op::kAllGather,
                           {noted},
                           {{"group", std::string("data")},
                            {"axis", int64_t{0}},
                            {"sizes", counts},
                            {"index", int64_t{data_rank}}},
                           average.name + "/all_gather");
    }
    if (averages.size() > 1) {
      Shape shape = graph.value(update.target).type.shape;
      shape.insert(shape.begin(), num_micro_batches * static_cast<int64_t>(averages.size()));
      all = inserter.after(
          id, Region::kUpdate, "Reshape", {all}, {{"shape", shape}}, average.name + "/all_rows");
    }
    std::vector<ValueId> operands = {update.target, all};
    if (may_skip) {
      operands.push_back(graph.node(scale).outputs[0]);
    }
    const ValueId folded = inserter.after(may_skip ? scale : id,
                                          Region::kUpdate,
                                          "FoldAverage",
                                          operands,
                                          average.attributes,
                                          average.name + "/fold");
    update.new_value = folded;
    notes.push_back({target, noted});
    for (const NodeId done : averages) {
      inserter.drop(done);
    }
  }
  graph.updates().insert(graph.updates().end(), notes.begin(), notes.end());
  return inserter.finish();
}

TrainingGraph sync_batch_norm(TrainingGraph lowered, int64_t own_samples, int64_t num_samples) {
  NodeInserter inserter(std::move(lowered));
  Graph& graph = inserter.graph();
  const auto fixed = [](const Node& node) { return node.attributes.get_int("fixed", 0) != 0; };
  for (NodeId id = 0; id < inserter.num_source_nodes(); ++id) {
    Node& node = graph.node(id);
    const bool counts = node.op_type == "BatchNormApply" || node.op_type == "BatchNormGradSums" ||
                        node.op_type == "BatchNormInputGrad" ||
                        node.op_type == "BatchNormStatistics";
    if (counts && !fixed(node)) {
      node.attributes.set("count", node.attributes.get_int("count") / own_samples * num_samples);
    }
    const bool moments = node.op_type == "BatchNormMoments";
    if (!moments && (node.op_type != "BatchNormGradSums" || fixed(node))) {
      continue;
    }
    const Node sums = node;
    const ValueId all =
        inserter.after(id,
                       sums.region,
                       comm_op::kAllReduce,
                       {sums.outputs[0]},
                       {{"group", std::string("data")}, {"reduction", std::string("sum")}},
                       sums.name + "/sync");
    // A parameter's gradient stays this rank's part: it is summed with all other gradients.
    inserter.redirect(sums.outputs[0], all, [](const Node& reader) {
      return reader.op_type != "BatchNormParameterGrad";
    });
  }
  return inserter.finish();
}

}  // namespace trainrt
