// Cuts the rank's nodes out of the whole graph; then for every value that crosses stages a Send is
// appended for its producer's rank and a Recv for the reader's, and readers are turned to the
// received copy. A value travels once per receiving stage and serves the readers of all its phases
// there. Numbers that a node of the update reads from one rank, as the norm of the gradient does of
// every parameter, travel as one tensor.
//
// Tags number the transfers of the whole graph, which all ranks enumerate alike; messages of one
// tag are in micro-batch order on both sides. Sends do not wait (Communicator), and ranks run their
// nodes in the order of one whole graph, so no two ranks wait for each other.
#include "parallel/rank_graph.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "graph/passes/pass.h"
#include "parallel/passes/node_inserter.h"

namespace trainrt {

namespace {

bool is_update(const Node& node) {
  return node.region == Region::kUpdate;
}

class RankGraphBuilder {
 public:
  RankGraphBuilder(const TrainingGraph& whole, const StageCut& cut, const Plan& plan, int rank)
      : whole_(whole.graph),
        cut_(cut),
        plan_(plan),
        rank_(rank),
        local_node_(static_cast<size_t>(whole.graph.num_nodes()), kNoNode) {
    find_reduce_nodes();
    cut_out(whole);
  }

  RankGraph run(UpdatePlace place) {
    for (NodeId id = 0; id < whole_.num_nodes(); ++id) {
      move_inputs(id);
    }
    order();
    sort_into_phases(place);
    return std::move(result_);
  }

 private:
  Graph& graph() { return result_.local.graph; }
  int stage_of(NodeId id) const { return cut_.virtual_stage[static_cast<size_t>(id)]; }

  bool runs_on(NodeId id, int rank) const {
    if (is_update(whole_.node(id))) {
      const std::vector<int>& ranks = cut_.update_ranks[static_cast<size_t>(id)];
      return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    }
    return stage_of(id) % plan_.pipeline_parallel == rank;
  }

  // What they read from others has no producer here.
  void copy_nodes(const std::vector<NodeId>& own) {
    local_value_.assign(static_cast<size_t>(whole_.num_values()), kNoValue);
    std::vector<bool> read(static_cast<size_t>(whole_.num_values()), false);
    for (const NodeId id : own) {
      for (const ValueId input : whole_.node(id).inputs) {
        if (input != kNoValue) {
          read[static_cast<size_t>(input)] = true;
        }
      }
    }
    const auto is_made_here = [&](ValueId id) {
      const NodeId from = whole_.value(id).producer;
      return from != kNoNode && local_node_[static_cast<size_t>(from)] != kNoNode;
    };
    for (ValueId id = 0; id < whole_.num_values(); ++id) {
      if (read[static_cast<size_t>(id)] && !is_made_here(id)) {
        Value copy = whole_.value(id);
        copy.producer = kNoNode;
        local_value_[static_cast<size_t>(id)] = graph().add_value(std::move(copy));
      }
    }
    for (const NodeId id : own) {
      Node copy = whole_.node(id);
      for (ValueId& input : copy.inputs) {
        input = input == kNoValue ? kNoValue : local_value_[static_cast<size_t>(input)];
      }
      copy.forward_node = copy.forward_node == kNoNode
                              ? kNoNode
                              : local_node_[static_cast<size_t>(copy.forward_node)];
      const NodeId made = graph().add_node(std::move(copy), {});
      for (const ValueId output : whole_.node(id).outputs) {
        ValueId& local = graph().node(made).outputs.emplace_back(kNoValue);
        if (output != kNoValue) {
          Value value = whole_.value(output);
          value.producer = made;
          local = local_value_[static_cast<size_t>(output)] = graph().add_value(std::move(value));
        }
      }
    }
    for (const ValueId id : whole_.outputs()) {
      if (is_made_here(id)) {
        graph().outputs().push_back(local_value_[static_cast<size_t>(id)]);
      }
    }
    for (const StateUpdate& update : whole_.updates()) {
      const ValueId target = local_value_[static_cast<size_t>(update.target)];
      if (target != kNoValue && is_made_here(update.new_value)) {
        graph().updates().push_back({target, local_value_[static_cast<size_t>(update.new_value)]});
      }
    }
  }

  void cut_out(const TrainingGraph& whole) {
    std::vector<NodeId> own;
    for (NodeId id = 0; id < whole_.num_nodes(); ++id) {
      if (runs_on(id, rank_)) {
        local_node_[static_cast<size_t>(id)] = static_cast<NodeId>(own.size());
        own.push_back(id);
        positions_.push_back(2 * id + 1);
        stages_.push_back(stage_of(id));
        reduces_.push_back(in_reduce_[static_cast<size_t>(id)]);
      }
    }
    TrainingGraph& local = result_.local;
    copy_nodes(own);
    local.parameters = whole.parameters;
    local.without_influence = whole.without_influence;
    const auto made_here = [&](ValueId id) {
      const NodeId from = id == kNoValue ? kNoNode : whole_.value(id).producer;
      return from != kNoNode && local_node_[static_cast<size_t>(from)] != kNoNode
                 ? local_value_[static_cast<size_t>(id)]
                 : kNoValue;
    };
    local.loss_sum = made_here(whole.loss_sum);
    local.item_count = made_here(whole.item_count);
    local.grad_norm = made_here(whole.grad_norm);
    local.correct = made_here(whole.correct);
  }

  // Turns the inputs of `id` that are made elsewhere to received copies, for every place that runs
  // it.
  void move_inputs(NodeId id) {
    const Node& node = whole_.node(id);
    const auto read_here = [&](size_t i, ValueId copy) {
      graph().node(local_node_[static_cast<size_t>(id)]).inputs[i] = copy;
    };
    if (is_update(node)) {
      for (const int to : cut_.update_ranks[static_cast<size_t>(id)]) {
        transfer_numbers(node, id, to);
      }
    }
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const NodeId from =
          node.inputs[i] == kNoValue ? kNoNode : whole_.value(node.inputs[i]).producer;
      if (from == kNoNode) {
        continue;
      }
      if (!is_update(node)) {
        if (stage_of(from) != stage_of(id)) {
          const ValueId copy = transfer_to_stage(node.inputs[i], from, id);
          if (local_node_[static_cast<size_t>(id)] != kNoNode) {
            read_here(i, copy);
          }
        }
        continue;
      }
      for (const int to : cut_.update_ranks[static_cast<size_t>(id)]) {
        if (!runs_on(from, to)) {
          const ValueId copy = transfer_to_rank(node.inputs[i], from, id, to);
          if (to == rank_) {
            read_here(i, copy);
          }
        }
      }
    }
  }

  // Between the stages of a micro-batch.
  ValueId transfer_to_stage(ValueId value, NodeId from, NodeId reader) {
    const int to = stage_of(reader);
    const auto [at, is_new] = moved_.try_emplace({value, to, false}, kNoValue);
    if (is_new) {
      // Forward values that a backward reads come along with the forward where that is possible.
      const bool forward = whole_.node(from).region == Region::kForward && stage_of(from) < to;
      const Region region = forward ? Region::kForward : Region::kBackward;
      at->second = transfer(value,
                            from,
                            stage_of(from) % plan_.pipeline_parallel,
                            whole_.node(from).region,
                            stage_of(from),
                            to % plan_.pipeline_parallel,
                            region,
                            to,
                            reader);
    }
    return at->second;
  }

  // Within the update, from the first pipeline rank that has the value.
  ValueId transfer_to_rank(ValueId value, NodeId from, NodeId reader, int to) {
    const auto [at, is_new] = moved_.try_emplace({value, to, true}, kNoValue);
    if (is_new) {
      at->second = transfer(
          value, from, first_rank_of(from), Region::kUpdate, -1, to, Region::kUpdate, -1, reader);
    }
    return at->second;
  }

  int first_rank_of(NodeId from) const {
    return is_update(whole_.node(from)) ? cut_.update_ranks[static_cast<size_t>(from)].front()
                                        : stage_of(from) % plan_.pipeline_parallel;
  }

  bool is_number(ValueId value) const {
    return whole_.value(value).type == TensorType{DType::kFloat64, {}} &&
           !read_in_reduce_[static_cast<size_t>(value)];
  }

  // All numbers that `node` of the update reads on rank `to` and that have not come yet: one
  // message from each rank that has some.
  void transfer_numbers(const Node& node, NodeId reader, int to) {
    std::map<int, std::vector<ValueId>> of_rank;
    for (const ValueId value : node.inputs) {
      const NodeId from = value == kNoValue ? kNoNode : whole_.value(value).producer;
      if (from != kNoNode && is_number(value) && !runs_on(from, to) &&
          moved_.try_emplace({value, to, true}, kNoValue).second) {
        of_rank[first_rank_of(from)].push_back(value);
      }
    }
    for (const auto& [source, values] : of_rank) {
      const int64_t tag = next_tag_++;
      if (source == rank_) {
        send_numbers(values, to, tag);
      } else if (to == rank_) {
        receive_numbers(values, source, tag, reader);
      }
    }
  }

  static Attributes message_attributes(int64_t tag, int peer) {
    return {{"group", std::string("pipeline")}, {"tag", tag}, {"peer", int64_t{peer}}};
  }

  void send_numbers(const std::vector<ValueId>& values, int to, int64_t tag) {
    int position = 0;  // behind the last of their producers
    for (const ValueId value : values) {
      position = std::max(position, 2 * whole_.value(value).producer + 2);
    }
    std::vector<ValueId> parts;
    for (const ValueId value : values) {
      const std::string name = concat(whole_.value(value).name, "/packed/", tag);
      parts.push_back(append_to_update("Reshape",
                                       {local_value_[static_cast<size_t>(value)]},
                                       {{"shape", Shape{1}}},
                                       name,
                                       position)[0]);
    }
    const std::vector<ValueId> packed = append_to_update(
        "Concat", parts, {{"axis", int64_t{0}}}, concat("trainrt.numbers/", tag), position);
    Attributes attributes = message_attributes(tag, to);
    attributes.set(comm_op::kNumbers, static_cast<int64_t>(values.size()));
    append_to_update(
        "Send", packed, std::move(attributes), concat("send/trainrt.numbers/", tag), position);
  }

  void receive_numbers(const std::vector<ValueId>& values, int source, int64_t tag, NodeId reader) {
    const int64_t count = static_cast<int64_t>(values.size());
    Attributes attributes = message_attributes(tag, source);
    attributes.set("shape", Shape{count});
    attributes.set("dtype", std::string(dtype_name(DType::kFloat64)));
    const std::vector<ValueId> packed = append_to_update(
        "Recv", {}, std::move(attributes), concat("recv/trainrt.numbers/", tag), 2 * reader);
    const std::vector<ValueId> parts =
        append_to_update("Split",
                         packed,
                         {{"axis", int64_t{0}}, {"split", Shape(values.size(), 1)}},
                         concat("trainrt.numbers/", tag, "/split"),
                         2 * reader);
    for (size_t i = 0; i < values.size(); ++i) {
      moved_[{values[i], rank_, true}] =
          append_to_update("Reshape",
                           {parts[i]},
                           {{"shape", Shape{}}},
                           concat(whole_.value(values[i]).name, "/", tag),
                           2 * reader)[0];
    }
  }

  std::vector<ValueId> append_to_update(const std::string& op_type,
                                        const std::vector<ValueId>& inputs,
                                        Attributes attributes,
                                        const std::string& name,
                                        int position) {
    return append(
        op_type, inputs, std::move(attributes), name, Region::kUpdate, -1, position, false);
  }

  // One transfer: a Send on rank `source`, a Recv on rank `target`. Returns the received copy on
  // the target and kNoValue elsewhere.
  ValueId transfer(ValueId value,
                   NodeId from,
                   int source,
                   Region send_region,
                   int send_stage,
                   int target,
                   Region recv_region,
                   int recv_stage,
                   NodeId reader) {
    const int64_t tag = next_tag_++;
    if (source != rank_ && target != rank_) {
      return kNoValue;
    }
    const Value& moved = whole_.value(value);
    const std::string name = concat(moved.name, "/", tag);
    if (source == rank_) {
      append("Send",
             {local_value_[static_cast<size_t>(value)]},
             message_attributes(tag, target),
             "send/" + name,
             send_region,
             send_stage,
             2 * from + 2,
             read_in_reduce_[static_cast<size_t>(value)]);
    }
    if (target != rank_) {
      return kNoValue;
    }
    Attributes attributes = message_attributes(tag, source);
    attributes.set("shape", moved.type.shape);
    attributes.set("dtype", std::string(dtype_name(moved.type.dtype)));
    return append("Recv",
                  {},
                  std::move(attributes),
                  "recv/" + name,
                  recv_region,
                  recv_stage,
                  2 * reader,
                  read_in_reduce_[static_cast<size_t>(value)])[0];
  }

  std::vector<ValueId> append(const std::string& op_type,
                              const std::vector<ValueId>& inputs,
                              Attributes attributes,
                              const std::string& name,
                              Region region,
                              int stage,
                              int position,
                              bool in_reduce) {
    GraphBuilder builder(graph());
    builder.set_region(region);
    positions_.push_back(position);
    stages_.push_back(stage);
    reduces_.push_back(in_reduce);
    return builder.node(op_type, inputs, std::move(attributes), name);
  }

  // The nodes, transfers among them, in the whole graph's order.
  void order() {
    std::vector<NodeId> nodes(static_cast<size_t>(graph().num_nodes()));
    std::iota(nodes.begin(), nodes.end(), 0);
    std::stable_sort(nodes.begin(), nodes.end(), [&](NodeId a, NodeId b) {
      return positions_[static_cast<size_t>(a)] < positions_[static_cast<size_t>(b)];
    });
    keep_nodes(result_.local, nodes, /*drop_unused=*/true);
    std::vector<int> stages;
    std::vector<bool> reduces;
    for (const NodeId id : nodes) {
      stages.push_back(stages_[static_cast<size_t>(id)]);
      reduces.push_back(reduces_[static_cast<size_t>(id)]);
    }
    stages_ = std::move(stages);
    reduces_ = std::move(reduces);
  }

  // Update nodes that a gradient collective waits for, and the collectives themselves: of an exact
  // reduction what a TreeSum waits for, and it.
  void find_reduce_nodes() {
    in_reduce_.assign(static_cast<size_t>(whole_.num_nodes()), false);
    read_in_reduce_.assign(static_cast<size_t>(whole_.num_values()), false);
    for (NodeId id = whole_.num_nodes(); id-- > 0;) {
      const Node& node = whole_.node(id);
      const bool collective =
          node.op_type == "TreeSum" ||
          ((node.op_type == comm_op::kAllReduce || node.op_type == comm_op::kReduceScatter) &&
           node.attributes.get_string("group", "") == "data");
      if (!is_update(node) || (!collective && !in_reduce_[static_cast<size_t>(id)])) {
        continue;
      }
      in_reduce_[static_cast<size_t>(id)] = true;
      for (const ValueId input : node.inputs) {
        if (input == kNoValue) {
          continue;
        }
        read_in_reduce_[static_cast<size_t>(input)] = true;
        const NodeId from = whole_.value(input).producer;
        if (from != kNoNode) {
          in_reduce_[static_cast<size_t>(from)] = true;
        }
      }
    }
  }

  // Backward nodes that a stage below, or the micro-batch's own forward order, waits for: what
  // leads to a Send. The rest are weight gradients, which zero-bubble schedules put off.
  std::vector<bool> input_gradient_nodes() {
    const Graph& local = graph();
    std::vector<bool> needed(static_cast<size_t>(local.num_nodes()), false);
    for (NodeId id = local.num_nodes(); id-- > 0;) {
      const Node& node = local.node(id);
      if (node.region != Region::kBackward ||
          (node.op_type != comm_op::kSend && !needed[static_cast<size_t>(id)])) {
        continue;
      }
      needed[static_cast<size_t>(id)] = true;
      for (const ValueId input : node.inputs) {
        const NodeId from = input == kNoValue ? kNoNode : local.value(input).producer;
        if (from != kNoNode) {
          needed[static_cast<size_t>(from)] = true;
        }
      }
    }
    return needed;
  }

  using PhaseKey = std::pair<PhaseKind, int>;  // and virtual stage

  PhaseKey phase_of(NodeId id, UpdatePlace place, const std::vector<bool>& input_gradients) const {
    const Node& node = result_.local.graph.node(id);
    const int stage = stages_[static_cast<size_t>(id)];
    switch (node.region) {
      case Region::kCount:
        return {PhaseKind::kCount, stage};
      case Region::kForward:
        return {PhaseKind::kForward, stage};
      case Region::kBackward:
        return {input_gradients[static_cast<size_t>(id)] ? PhaseKind::kBackward
                                                         : PhaseKind::kWeightGrad,
                stage};
      case Region::kUpdate:
        break;
    }
    if (place == UpdatePlace::kInBackward) {
      return {splits_backward() ? PhaseKind::kWeightGrad : PhaseKind::kBackward, rank_};
    }
    return {reduces_[static_cast<size_t>(id)] ? PhaseKind::kReduce : PhaseKind::kUpdate, rank_};
  }

  // Sums over data ranks of accumulated gradients, and of those of several uses of a parameter,
  // move to the phase that accumulates the last of them; each may write over what it alone reads.
  void sum_in_backward(std::vector<PhaseKey>& phases) {
    Graph& local = graph();
    const std::vector<std::vector<NodeId>> consumers = local.consumers();
    std::vector<bool> ready(phases.size(), false);
    for (NodeId id = 0; id < local.num_nodes(); ++id) {
      Node& node = local.node(id);
      if (node.op_type == "Accumulate") {
        ready[static_cast<size_t>(id)] = true;
        continue;
      }
      const bool over_ranks =
          node.op_type == comm_op::kAllReduce || node.op_type == comm_op::kReduceScatter;
      if (phases[static_cast<size_t>(id)].first != PhaseKind::kReduce ||
          !(over_ranks ? node.attributes.get_string("group") == "data" : node.op_type == "Add")) {
        continue;
      }
      std::vector<PhaseKey> made;
      for (const ValueId input : node.inputs) {
        const NodeId from = local.value(input).producer;
        if (from != kNoNode && ready[static_cast<size_t>(from)] &&
            consumers[static_cast<size_t>(input)].size() == 1) {
          made.push_back(phases[static_cast<size_t>(from)]);
        }
      }
      // The first stage's backward is the last to run.
      const auto last = std::min_element(made.begin(), made.end());
      if (made.size() == node.inputs.size() &&
          std::all_of(made.begin(), made.end(), [&](const PhaseKey& key) {
            return key.first == last->first;
          })) {
        phases[static_cast<size_t>(id)] = *last;
        ready[static_cast<size_t>(id)] = true;
        if (node.op_type == comm_op::kReduceScatter) {
          node.attributes.set("in_place", int64_t{1});
        }
      }
    }
  }

  bool splits_backward() const { return plan_.schedule == ScheduleKind::kZeroBubbleH1; }

  void sort_into_phases(UpdatePlace place) {
    const Graph& local = graph();
    const std::vector<bool> input_gradients =
        splits_backward() ? input_gradient_nodes()
                          : std::vector<bool>(static_cast<size_t>(local.num_nodes()), true);
    const bool has_backward =
        std::any_of(local.nodes().begin(), local.nodes().end(), [](const Node& node) {
          return node.region == Region::kBackward;
        });
    std::vector<PhaseKey> phase_of_node;
    for (NodeId id = 0; id < local.num_nodes(); ++id) {
      phase_of_node.push_back(
          phase_of(id, has_backward ? place : UpdatePlace::kAfterBackward, input_gradients));
    }
    if (place == UpdatePlace::kSumsInBackward) {
      sum_in_backward(phase_of_node);
    }
    std::map<PhaseKey, std::vector<NodeId>> phases;
    for (NodeId id = 0; id < local.num_nodes(); ++id) {
      phases[phase_of_node[static_cast<size_t>(id)]].push_back(id);
    }
    for (auto& [key, nodes] : phases) {
      result_.phases.push_back({key.first, key.second, std::move(nodes)});
    }
  }

  const Graph& whole_;
  const StageCut& cut_;
  const Plan& plan_;
  int rank_;
  RankGraph result_;
  std::vector<NodeId> local_node_;    // by node of the whole graph; kNoNode: runs elsewhere
  std::vector<ValueId> local_value_;  // by value of the whole graph
  // (value, virtual stage or pipeline rank, within the update?) -> received copy.
  std::map<std::tuple<ValueId, int, bool>, ValueId> moved_;
  // Of the local graph's nodes.
  std::vector<int> positions_;  // in the whole graph
  std::vector<int> stages_;     // virtual
  std::vector<bool> reduces_;
  std::vector<bool> in_reduce_;       // of the whole graph's nodes
  std::vector<bool> read_in_reduce_;  // of its values
  int64_t next_tag_ = 0;
};

}  // namespace

RankGraph make_rank_graph(const TrainingGraph& whole,
                          const StageCut& cut,
                          const Plan& plan,
                          int stage,
                          UpdatePlace place) {
  return RankGraphBuilder(whole, cut, plan, stage).run(place);
}

}  // namespace trainrt
