// First fit by order: a collective joins the open bucket of its kind unless that would grow past
// the limit, or one would wait for the other, through messages of other stages too. Then the nodes
// are put in order again: Kahn's algorithm with a heap of positions, where a bucket stands where
// its last tensor's collective stood (its first's, when none waits for anything in the phase).
//
// Ranks of a group must agree. Data ranks run one graph. Tensor ranks may not: a piece of two rows
// is cut over two data ranks, one of a single row is not. So the buckets of tensor ranks are formed
// first, while nothing but dependencies counts that all have, and tensor ranks' collectives keep
// their order whatever the buckets of data ranks then delay.
#include "parallel/passes/buckets.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <string>
#include <tuple>
#include <utility>

#include "parallel/passes/node_inserter.h"
#include "parallel/phase_order.h"

namespace trainrt {

namespace {

constexpr int64_t kCpuBytes = int64_t{1} << 20, kCpuBytesPerRank = int64_t{256} << 10;
constexpr int64_t kGpuBytes = int64_t{25} << 20, kGpuBytesPerRank = int64_t{4} << 20;

struct Bucket {
  std::vector<NodeId> members;
  int64_t bytes = 0;
  bool waits = false;  // for a node of the phase
};

// What the members of a bucket have in common: operator, reduction, axes, dtype, region.
using BucketKind = std::tuple<std::string, std::string, int64_t, int64_t, DType, Region>;

class Bucketing {
 public:
  Bucketing(TrainingGraph& local, std::vector<Phase>& phases)
      : local_(local), graph_(local.graph), phases_(phases), consumers_(graph_.consumers()) {
    const size_t num_nodes = static_cast<size_t>(graph_.num_nodes());
    phase_of_.resize(num_nodes, -1);
    positions_.resize(num_nodes, 0);
    bucket_of_.resize(num_nodes, -1);
    after_.resize(num_nodes);
    int position = 0;
    for (size_t p = 0; p < phases_.size(); ++p) {
      for (const NodeId id : phases_[p].nodes) {
        phase_of_[static_cast<size_t>(id)] = static_cast<int>(p);
        positions_[static_cast<size_t>(id)] = position++;
      }
      for (const auto& [earlier, later] : order_without_data(graph_, phases_[p].nodes)) {
        after_[static_cast<size_t>(earlier)].push_back(later);
      }
    }
  }

  void form(const std::string& group, int64_t limit) {
    of_group_.assign(static_cast<size_t>(graph_.num_nodes()), false);
    for (NodeId id = 0; id < graph_.num_nodes(); ++id) {
      of_group_[static_cast<size_t>(id)] = is_collective_of(id, group);
    }
    for (const Phase& phase : phases_) {
      fill(phase, group, limit);
    }
  }

  // From now on collectives of `group` keep their order.
  void keep_order(const std::string& group) {
    for (const Phase& phase : phases_) {
      std::vector<std::pair<int, NodeId>> order;
      for (const NodeId id : phase.nodes) {
        if (is_collective_of(id, group) && represents(id)) {
          order.emplace_back(position(id), id);
        }
      }
      std::sort(order.begin(), order.end());
      for (size_t i = 1; i < order.size(); ++i) {
        after_[static_cast<size_t>(order[i - 1].second)].push_back(order[i].second);
      }
    }
  }

  bool has_merges() const {
    return std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
      return bucket.members.size() > 1;
    });
  }

  void merge() {
    for (const Bucket& bucket : buckets_) {
      if (bucket.members.size() > 1) {
        merge(bucket);
      }
    }
    put_in_order();
  }

 private:
  NodeId producer(ValueId id) const { return id == kNoValue ? kNoNode : graph_.value(id).producer; }
  int phase_of(NodeId id) const { return phase_of_[static_cast<size_t>(id)]; }

  bool is_collective_of(NodeId id, const std::string& group) const {
    const Node& node = graph_.node(id);
    return is_communication(node.op_type) && node.op_type != comm_op::kSend &&
           node.op_type != comm_op::kRecv && node.attributes.get_string("group") == group;
  }

  const Bucket* bucket_of(NodeId id) const {
    const int bucket = bucket_of_[static_cast<size_t>(id)];
    return bucket < 0 ? nullptr : &buckets_[static_cast<size_t>(bucket)];
  }
  // The first member stands for its bucket.
  bool represents(NodeId id) const {
    const Bucket* bucket = bucket_of(id);
    return bucket == nullptr || bucket->members[0] == id;
  }
  // Where a node, or its bucket, would like to stand.
  int position(NodeId id) const {
    const Bucket* bucket = bucket_of(id);
    const NodeId at = bucket == nullptr ? id
                      : bucket->waits   ? bucket->members.back()
                                        : bucket->members[0];
    return positions_[static_cast<size_t>(at)];
  }

  // ---- forming ---------------------------------------------------------------------------------

  // Whether all who read what `id` makes accumulate it.
  bool is_accumulated(NodeId id) const {
    const std::vector<NodeId>& readers =
        consumers_[static_cast<size_t>(graph_.node(id).outputs[0])];
    return std::all_of(readers.begin(), readers.end(), [&](NodeId reader) {
      return graph_.node(reader).op_type == "Accumulate";
    });
  }

  bool may_join(NodeId id, const std::string& group) const {
    const Node& node = graph_.node(id);
    if (node.op_type == comm_op::kAllToAll) {  // packs anyway
      return group == "data" && node.region == Region::kUpdate &&
             node.attributes.get_string("group") == group;
    }
    const bool gathers = node.op_type == comm_op::kAllGather;
    const bool sums =
        node.op_type == comm_op::kAllReduce || node.op_type == comm_op::kReduceScatter;
    if ((!gathers && !sums) || node.attributes.get_string("group") != group) {
      return false;
    }
    const int axis = static_cast<int>(node.attributes.get_int("axis", 0));
    if (dims_product(graph_.value(node.inputs[0]).type.shape, 0, axis) > 1) {
      return false;  // it is packed
    }
    if (node.region == Region::kUpdate) {
      return true;
    }
    return group == "data" && (gathers ? graph_.value(node.inputs[0]).kind == ValueKind::kParameter
                                       : node.region == Region::kBackward && is_accumulated(id));
  }

  BucketKind kind_of(const Node& node) const {
    return {node.op_type,
            node.attributes.get_string("reduction", "sum"),
            node.attributes.get_int("axis", 0),
            node.attributes.get_int("concat_axis", 0),
            graph_.value(node.inputs[0]).type.dtype,
            node.region};
  }

  // Of the whole tensor: equal on all ranks.
  int64_t bytes_of(const Node& node) const {
    if (node.op_type == comm_op::kAllToAll) {
      TensorType whole = graph_.value(node.inputs[0]).type;
      const std::vector<int64_t>& parts = node.attributes.get_ints("concat_sizes");
      whole.shape[static_cast<size_t>(node.attributes.get_int("concat_axis"))] =
          std::accumulate(parts.begin(), parts.end(), int64_t{0});
      return whole.bytes();
    }
    return graph_.value(node.op_type == comm_op::kReduceScatter ? node.inputs[0] : node.outputs[0])
        .type.bytes();
  }

  bool waits_in_phase(NodeId id) const {
    const std::vector<NodeId>& readers =
        consumers_[static_cast<size_t>(graph_.node(id).outputs[0])];
    if (!readers.empty() && graph_.node(readers[0]).op_type == "TreeSum") {
      return true;  // on all ranks alike, though not all have to take subtrees out of a stack
    }
    const NodeId from = producer(graph_.node(id).inputs[0]);
    return from != kNoNode && phase_of(from) == phase_of(id);
  }

  void fill(const Phase& phase, const std::string& group, int64_t limit) {
    std::map<BucketKind, size_t> open;
    for (const NodeId id : phase.nodes) {
      const Node& node = graph_.node(id);
      if (!may_join(id, group) || bytes_of(node) > limit) {
        continue;
      }
      const auto [at, is_new] = open.try_emplace(kind_of(node), buckets_.size());
      const bool fits = !is_new && buckets_[at->second].bytes + bytes_of(node) <= limit &&
                        !wait_for_each_other(buckets_[at->second], id);
      if (!fits) {
        at->second = buckets_.size();
        buckets_.emplace_back();
      }
      Bucket& bucket = buckets_[at->second];
      bucket.members.push_back(id);
      bucket.bytes += bytes_of(node);
      bucket.waits = bucket.waits || waits_in_phase(id);
      bucket_of_[static_cast<size_t>(id)] = static_cast<int>(at->second);
    }
  }

  // Would a bucket with `id` wait for itself? Or for a collective of the group before `id`, which
  // is to keep its place? The buckets formed so far count as joined.
  bool wait_for_each_other(const Bucket& bucket, NodeId id) {
    if (!bucket.waits && !waits_in_phase(id)) {
      return false;
    }
    const auto is_member = [&](NodeId other) { return bucket_of(other) == &bucket; };
    return reaches({id}, is_member) || reaches(bucket.members, [&](NodeId other) {
             return other == id || (!is_member(other) && of_group_[static_cast<size_t>(other)] &&
                                    position(other) < positions_[static_cast<size_t>(id)]);
           });
  }

  template <typename Wanted>
  bool reaches(std::vector<NodeId> open, const Wanted& wanted) {
    const int phase = phase_of(open[0]);
    seen_.assign(bucket_of_.size(), false);
    const auto visit = [&](NodeId id) {
      if (!seen_[static_cast<size_t>(id)] && phase_of(id) == phase) {
        seen_[static_cast<size_t>(id)] = true;
        open.push_back(id);
      }
    };
    const auto look = [&](NodeId next) {
      if (phase_of(next) == phase && wanted(next)) {
        return true;
      }
      visit(next);
      if (const Bucket* joined = bucket_of(next)) {
        for (const NodeId member : joined->members) {
          visit(member);
        }
      }
      return false;
    };
    while (!open.empty()) {
      const NodeId id = open.back();
      open.pop_back();
      if (any_follower(id, look)) {
        return true;
      }
    }
    return false;
  }

  // Whether `fn` says so of a node that comes after `id`: it is asked of one once for each value of
  // `id` that it reads, until it does.
  template <typename Fn>
  bool any_follower(NodeId id, const Fn& fn) const {
    const std::vector<NodeId>& after = after_[static_cast<size_t>(id)];
    if (std::any_of(after.begin(), after.end(), fn)) {
      return true;
    }
    for (const ValueId output : graph_.node(id).outputs) {
      if (output != kNoValue) {
        const std::vector<NodeId>& readers = consumers_[static_cast<size_t>(output)];
        if (std::any_of(readers.begin(), readers.end(), fn)) {
          return true;
        }
      }
    }
    return false;
  }

  // ---- merging ---------------------------------------------------------------------------------

  // The first member takes the tensors of all.
  void merge(const Bucket& bucket) {
    const NodeId first = bucket.members[0];
    std::vector<ValueId> inputs, outputs;
    std::map<std::string, std::vector<int64_t>> sizes = {{"sizes", {}}, {"concat_sizes", {}}};
    for (const NodeId member : bucket.members) {
      Node& node = graph_.node(member);
      for (auto& [name, all] : sizes) {
        const std::vector<int64_t> own = node.attributes.get_ints(name, {});
        all.insert(all.end(), own.begin(), own.end());
      }
      Value& output = graph_.value(node.outputs[0]);
      output.producer = first;
      output.output_index = static_cast<int>(outputs.size());
      inputs.push_back(node.inputs[0]);
      outputs.push_back(node.outputs[0]);
    }
    Node& node = graph_.node(first);
    node.name += concat("+", bucket.members.size() - 1);
    node.inputs = std::move(inputs);
    node.outputs = std::move(outputs);
    for (auto& [name, all] : sizes) {
      if (!all.empty()) {
        node.attributes.set(name, std::move(all));
      }
    }
  }

  void put_in_order() {
    consumers_ = graph_.consumers();
    // What comes after a member comes after its bucket.
    const auto place = [&](NodeId id) {
      const Bucket* bucket = bucket_of(id);
      return bucket == nullptr ? id : bucket->members[0];
    };
    const int num_nodes = graph_.num_nodes();
    std::vector<std::vector<NodeId>> next(static_cast<size_t>(num_nodes));
    std::vector<int> missing(next.size(), 0);
    for (NodeId id = 0; id < num_nodes; ++id) {
      if (represents(id)) {
        any_follower(id, [&](NodeId follower) {
          next[static_cast<size_t>(id)].push_back(follower);
          return false;
        });
      } else {
        next[static_cast<size_t>(place(id))].insert(next[static_cast<size_t>(place(id))].end(),
                                                    after_[static_cast<size_t>(id)].begin(),
                                                    after_[static_cast<size_t>(id)].end());
      }
    }
    for (std::vector<NodeId>& all : next) {
      for (NodeId& id : all) {
        id = place(id);
        ++missing[static_cast<size_t>(id)];
      }
    }
    using Entry = std::pair<int, NodeId>;  // position, node
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    int num_kept = 0;
    for (NodeId id = 0; id < num_nodes; ++id) {
      num_kept += represents(id) ? 1 : 0;
      if (represents(id) && missing[static_cast<size_t>(id)] == 0) {
        ready.emplace(position(id), id);
      }
    }
    for (Phase& phase : phases_) {
      phase.nodes.clear();
    }
    std::vector<NodeId> keep;
    while (!ready.empty()) {
      const NodeId id = ready.top().second;
      ready.pop();
      phases_[static_cast<size_t>(phase_of(id))].nodes.push_back(static_cast<NodeId>(keep.size()));
      keep.push_back(id);
      for (const NodeId follower : next[static_cast<size_t>(id)]) {
        if (--missing[static_cast<size_t>(follower)] == 0) {
          ready.emplace(position(follower), follower);
        }
      }
    }
    TRAINRT_CHECK(static_cast<int>(keep.size()) == num_kept,
                  "buckets of collectives wait for each other");
    keep_nodes(local_, keep);
  }

  TrainingGraph& local_;
  Graph& graph_;
  std::vector<Phase>& phases_;
  std::vector<std::vector<NodeId>> consumers_;
  std::vector<int> phase_of_, positions_, bucket_of_;  // by node; no bucket: -1
  std::vector<std::vector<NodeId>> after_;             // by node: who keeps behind it, without data
  std::vector<Bucket> buckets_;
  std::vector<bool> of_group_;  // by node: a collective of the group that buckets are formed for
  std::vector<bool> seen_;      // of reaches()
};

}  // namespace

int64_t bucket_bytes(Backend backend, int num_ranks) {
  return backend == Backend::kCuda ? std::max(kGpuBytes, num_ranks * kGpuBytesPerRank)
                                   : std::max(kCpuBytes, num_ranks * kCpuBytesPerRank);
}

void bucket_collectives(TrainingGraph& local,
                        std::vector<Phase>& phases,
                        const Plan& plan,
                        Backend backend) {
  if (plan.data_parallel == 1 && plan.tensor_parallel == 1) {
    return;
  }
  Bucketing bucketing(local, phases);
  bucketing.form("tensor", bucket_bytes(backend, plan.tensor_parallel));
  bucketing.keep_order("tensor");
  bucketing.form("data", bucket_bytes(backend, plan.data_parallel));
  if (bucketing.has_merges()) {
    bucketing.merge();
  }
}

}  // namespace trainrt
