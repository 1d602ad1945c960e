#include "parallel/passes/exact_reduction.h"

#include "parallel/passes/node_inserter.h"
#include "parallel/program.h"
#include "parallel/reduction_tree.h"

namespace trainrt {

namespace {

class ExactReduction {
 public:
  ExactReduction(TrainingGraph lowered,
                 const std::vector<std::vector<MicroBatchCut>>& ranks,
                 int64_t num_shards,
                 int data_rank)
      : inserter_(std::move(lowered)),
        data_rank_(data_rank),
        own_(accumulate_tree(ranks.at(static_cast<size_t>(data_rank)), num_shards)),
        merges_(tree_sum_merges(ranks, num_shards)) {
    for (const std::vector<MicroBatchCut>& cuts : ranks) {
      num_subtrees_.push_back(accumulate_tree(cuts, num_shards).num_subtrees);
    }
    // A rank without samples runs no AccumulateTree, but has the tensor.
    own_.num_slots = std::max<int64_t>(own_.num_slots, own_.num_subtrees);
  }

  TrainingGraph run() {
    const int num_nodes = inserter_.num_source_nodes();
    for (NodeId id = 0; id < num_nodes; ++id) {
      if (inserter_.graph().node(id).op_type == "Accumulate") {
        stack_accumulator(id);
      }
    }
    for (NodeId id = 0; id < num_nodes; ++id) {
      const Node& node = inserter_.graph().node(id);
      const bool sums =
          node.op_type == comm_op::kAllReduce || node.op_type == comm_op::kReduceScatter;
      if (sums && node.region == Region::kUpdate && node.attributes.get_string("group") == "data") {
        exchange(id);
      }
    }
    return inserter_.finish();
  }

 private:
  void stack_accumulator(NodeId id) {
    const ValueId micro_batch = micro_batch_input(inserter_.graph());
    Node& node = inserter_.graph().node(id);
    node.op_type = "AccumulateTree";
    node.inputs.push_back(micro_batch);
    node.attributes = {{"slot", own_.slot}, {"first", own_.first}, {"merges", own_.merges}};
    const ValueId sum = node.outputs[0];
    for (const ValueId stack : {node.inputs[0], sum}) {
      Shape& shape = inserter_.graph().value(stack).type.shape;
      shape.insert(shape.begin(), own_.num_slots);
    }
    if (num_subtrees_.size() == 1) {
      const std::string name = inserter_.graph().value(sum).name;
      const ValueId total = inserter_.after(
          id, Region::kUpdate, "TreeSum", {sum}, {{"merges", merges_}}, name + "/tree_sum");
      inserter_.redirect(
          sum, total, [](const Node& reader) { return reader.region == Region::kUpdate; });
    }
  }

  // Turns the collective `id` over an accumulator into the exchange of subtrees and their sum.
  void exchange(NodeId id) {
    const Node node = inserter_.graph().node(id);
    ValueId stack = node.inputs[0];
    const NodeId maker = inserter_.graph().value(stack).producer;
    TRAINRT_CHECK(maker != kNoNode && inserter_.graph().node(maker).op_type == "AccumulateTree",
                  "'",
                  node.name,
                  "' sums over data ranks what is no accumulated gradient");
    if (own_.num_slots > own_.num_subtrees) {
      stack = inserter_.after(id,
                              Region::kUpdate,
                              "Slice",
                              {stack},
                              {{"axes", Shape{0}},
                               {"starts", Shape{0}},
                               {"ends", Shape{own_.num_subtrees}},
                               {"steps", Shape{1}}},
                              node.name + "/subtrees");
    }
    Attributes attributes = {{"group", std::string("data")}, {"index", int64_t{data_rank_}}};
    std::string exchange = comm_op::kAllGather;
    if (node.op_type == comm_op::kAllReduce) {
      attributes.set("axis", int64_t{0});
      attributes.set("sizes", num_subtrees_);
    } else {
      exchange = comm_op::kAllToAll;
      attributes.set("axis", node.attributes.get_int("axis") + 1);
      attributes.set("sizes", node.attributes.get_ints("sizes"));
      attributes.set("concat_axis", int64_t{0});
      attributes.set("concat_sizes", num_subtrees_);
    }
    const ValueId subtrees = inserter_.after(id,
                                             Region::kUpdate,
                                             exchange,
                                             {stack},
                                             std::move(attributes),
                                             node.name + "/subtrees_of_all");
    const ValueId total = inserter_.after(
        id, Region::kUpdate, "TreeSum", {subtrees}, {{"merges", merges_}}, node.name + "/tree_sum");
    inserter_.redirect(node.outputs[0], total, [](const Node&) { return true; });
    inserter_.drop(id);
  }

  NodeInserter inserter_;
  int data_rank_;
  TreeAccumulation own_;
  std::vector<int64_t> merges_;
  std::vector<int64_t> num_subtrees_;  // by data rank
};

}  // namespace

TrainingGraph exact_reduction(TrainingGraph lowered,
                              const std::vector<std::vector<MicroBatchCut>>& ranks,
                              int64_t num_shards,
                              int data_rank) {
  return ExactReduction(std::move(lowered), ranks, num_shards, data_rank).run();
}

}  // namespace trainrt
