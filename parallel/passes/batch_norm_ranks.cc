#include "parallel/passes/batch_norm_ranks.h"

#include <algorithm>

#include "parallel/passes/node_inserter.h"
#include "parallel/program.h"

namespace trainrt {

TrainingGraph fold_running_averages(TrainingGraph lowered,
                                    const std::vector<std::vector<MicroBatchCut>>& ranks,
                                    int data_rank) {
  if (lowered.graph.values_of_kind(ValueKind::kState).empty()) {
    return lowered;
  }
  std::vector<int64_t> counts;
  for (const std::vector<MicroBatchCut>& cuts : ranks) {
    counts.push_back(static_cast<int64_t>(cuts.size()));
  }
  NodeInserter inserter(std::move(lowered));
  Graph& graph = inserter.graph();
  std::vector<StateUpdate> notes;
  for (StateUpdate& update : graph.updates()) {
    const NodeId id = graph.value(update.new_value).producer;
    if (graph.value(update.target).kind != ValueKind::kState || id == kNoNode ||
        graph.node(id).region == Region::kUpdate) {
      continue;
    }
    const Node average = graph.node(id);
    const std::string name = graph.value(update.target).name;
    TRAINRT_REQUIRE(average.op_type == "RunningAverage",
                    kInfeasiblePlan,
                    "state '",
                    name,
                    "' is changed within the micro-batch by a ",
                    average.op_type,
                    ", which data ranks cannot agree on; use one data rank");
    Value rows;
    rows.name = graph.unique_value_name(name + ".rows");
    rows.type = graph.value(update.target).type;
    rows.type.shape.insert(rows.type.shape.begin(), counts[static_cast<size_t>(data_rank)]);
    rows.kind = ValueKind::kGradient;  // as gradients: collected in a step, meaningless after it
    const ValueId target = graph.add_value(std::move(rows));
    const ValueId row = average.inputs[1];
    const ValueId micro_batch = micro_batch_input(graph);
    const ValueId noted = inserter.after(
        id, average.region, "StoreRow", {target, row, micro_batch}, {}, average.name + "/note");
    const ValueId all = inserter.after(id,
                                       Region::kUpdate,
                                       comm_op::kAllGather,
                                       {noted},
                                       {{"group", std::string("data")},
                                        {"axis", int64_t{0}},
                                        {"sizes", counts},
                                        {"index", int64_t{data_rank}}},
                                       average.name + "/all_gather");
    const ValueId folded = inserter.after(id,
                                          Region::kUpdate,
                                          "FoldAverage",
                                          {update.target, all},
                                          average.attributes,
                                          average.name + "/fold");
    update.new_value = folded;
    notes.push_back({target, noted});
    inserter.drop(id);
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
