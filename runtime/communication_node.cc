// Segments of a gather or scatter lie one after the other in a communicator's buffer. Along axis 0
// that is the tensor's own order; along another axis the tensor is [outer, axis, inner] and segment
// r is the block [outer, sizes[r], inner], packed into the workspace (or unpacked from it) by
// `outer` copies of sizes[r] * inner elements.
#include "runtime/communication_node.h"

#include <algorithm>
#include <numeric>

namespace trainrt {

namespace {

ReductionKind reduction_of(const Node& node) {
  const std::string name = node.attributes.get_string("reduction", "sum");
  if (name == "max") {
    return ReductionKind::kMax;
  }
  if (name == "min") {
    return ReductionKind::kMin;
  }
  TRAINRT_CHECK(name == "sum", "node '", node.name, "': reduction '", name, "'");
  return ReductionKind::kSum;
}

// How a whole tensor is cut along `axis` into segments of `sizes`.
struct Segments {
  int64_t outer = 1;
  int64_t inner_bytes = 1;
  std::vector<int64_t> sizes;
  std::vector<int64_t> counts;  // elements of each segment

  // Of tensor `i` of a bucket of `num_tensors`.
  Segments(const Node& node, const TensorType& whole, size_t i = 0, size_t num_tensors = 1)
      : Segments(whole,
                 static_cast<int>(node.attributes.get_int("axis", 0)),
                 node.attributes.get_ints("sizes"),
                 i,
                 num_tensors) {}
  Segments(const TensorType& whole,
           int axis,
           const std::vector<int64_t>& all_sizes,
           size_t i,
           size_t num_tensors) {
    const size_t degree = all_sizes.size() / num_tensors;
    sizes.assign(all_sizes.begin() + static_cast<std::ptrdiff_t>(i * degree),
                 all_sizes.begin() + static_cast<std::ptrdiff_t>((i + 1) * degree));
    outer = dims_product(whole.shape, 0, axis);
    const int64_t inner = dims_product(whole.shape, axis + 1, static_cast<int>(whole.shape.size()));
    inner_bytes = inner * dtype_bytes(whole.dtype);
    for (const int64_t size : sizes) {
      counts.push_back(outer * size * inner);
    }
  }

  int64_t bytes(size_t rank) const { return outer * sizes[rank] * inner_bytes; }

  // Copies the segment of `rank` between its rows in the tensor and the bytes at `packed`.
  void copy(Device& device, std::byte* tensor, size_t rank, std::byte* packed, bool pack) const {
    const auto own = sizes.begin() + static_cast<std::ptrdiff_t>(rank);
    std::byte* at = tensor + std::accumulate(sizes.begin(), own, int64_t{0}) * inner_bytes;
    const int64_t row = *own * inner_bytes;
    const int64_t pitch = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) * inner_bytes;
    device.copy_rows(pack ? packed : at,
                     pack ? row : pitch,
                     pack ? at : packed,
                     pack ? pitch : row,
                     row,
                     outer,
                     Lane::kCommunication);
  }

  // Copies between the tensor's order and the order of segments.
  void copy(Device& device, std::byte* tensor, std::byte* packed, bool pack) const {
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      copy(device, tensor, rank, packed, pack);
      packed += bytes(rank);
    }
  }
};

void all_reduce(const Node& node,
                std::span<const TensorRef> inputs,
                std::span<const TensorRef> outputs,
                Communicator& group,
                Device& device) {
  std::vector<WholeTensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorType& type = *outputs[i].type;
    if (inputs[i].data != outputs[i].data) {
      device.copy(outputs[i].data, inputs[i].data, type.bytes(), Lane::kCommunication);
    }
    tensors.push_back({outputs[i].data, num_elements(type.shape)});
  }
  group.all_reduce(tensors, outputs[0].type->dtype, reduction_of(node));
}

std::byte* packing_room(const Node& node, std::span<std::byte> workspace, int64_t bytes) {
  TRAINRT_CHECK(static_cast<int64_t>(workspace.size()) >= bytes,
                "node '",
                node.name,
                "' needs ",
                bytes,
                " bytes of workspace, has ",
                workspace.size());
  return workspace.data();
}

void reduce_scatter(const Node& node,
                    std::span<const TensorRef> inputs,
                    std::span<const TensorRef> outputs,
                    std::span<std::byte> workspace,
                    Communicator& group,
                    Device& device) {
  std::vector<CutTensor> tensors;
  int64_t waiting = 0;  // bytes of results that are to be written over an input
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Segments segments(node, *inputs[i].type, i, inputs.size());
    std::byte* source = static_cast<std::byte*>(inputs[i].data);
    std::byte* result = static_cast<std::byte*>(outputs[i].data);
    if (segments.outer > 1) {
      TRAINRT_CHECK(inputs.size() == 1, "bucket '", node.name, "' would have to be packed");
      std::byte* packed = packing_room(node, workspace, inputs[i].type->bytes());
      segments.copy(device, source, packed, true);
      source = packed;
    } else if (source == result) {  // which the others read until all have come
      const int64_t begin = waiting;
      waiting += outputs[i].type->bytes();
      result = packing_room(node, workspace, waiting) + begin;
    }
    tensors.push_back({source, result, segments.counts});
  }
  group.reduce_scatter(tensors, inputs[0].type->dtype, reduction_of(node));
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (tensors[i].output != outputs[i].data) {
      device.copy(
          outputs[i].data, tensors[i].output, outputs[i].type->bytes(), Lane::kCommunication);
    }
  }
}

void all_gather(const Node& node,
                std::span<const TensorRef> inputs,
                std::span<const TensorRef> outputs,
                std::span<std::byte> workspace,
                Communicator& group,
                Device& device) {
  const Segments first(node, *outputs[0].type, 0, outputs.size());
  if (first.outer > 1) {
    TRAINRT_CHECK(inputs.size() == 1, "bucket '", node.name, "' would have to be unpacked");
    std::byte* packed = packing_room(node, workspace, outputs[0].type->bytes());
    group.all_gather(inputs[0].data, packed, first.counts, inputs[0].type->dtype);
    first.copy(device, static_cast<std::byte*>(outputs[0].data), packed, false);
    return;
  }
  std::vector<CutTensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Segments segments(node, *outputs[i].type, i, outputs.size());
    tensors.push_back({inputs[i].data, outputs[i].data, segments.counts});
  }
  group.all_gather(tensors, inputs[0].type->dtype);
}

// Tensors on one side of an all-to-all: what goes to a rank, or comes from it, lies together.
struct Exchanged {
  std::vector<Segments> segments;  // by tensor
  std::vector<int64_t> counts;     // elements by rank, of all tensors

  Exchanged(std::span<const TensorRef> tensors, int64_t axis, const std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      segments.emplace_back(*tensors[i].type, static_cast<int>(axis), sizes, i, tensors.size());
      counts.resize(segments[i].counts.size(), 0);
      for (size_t rank = 0; rank < counts.size(); ++rank) {
        counts[rank] += segments[i].counts[rank];
      }
    }
  }

  void copy(Device& device,
            std::span<const TensorRef> tensors,
            std::byte* packed,
            bool pack) const {
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        segments[i].copy(device, static_cast<std::byte*>(tensors[i].data), rank, packed, pack);
        packed += segments[i].bytes(rank);
      }
    }
  }
};

// Cut along one axis, grown along another: the segment of each rank is packed on the way out, and
// what comes from each is unpacked along the other axis.
void all_to_all(const Node& node,
                std::span<const TensorRef> inputs,
                std::span<const TensorRef> outputs,
                std::span<std::byte> workspace,
                Communicator& group,
                Device& device) {
  const Exchanged sent(
      inputs, node.attributes.get_int("axis", 0), node.attributes.get_ints("sizes"));
  const Exchanged received(
      outputs, node.attributes.get_int("concat_axis", 0), node.attributes.get_ints("concat_sizes"));
  int64_t in_bytes = 0, out_bytes = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in_bytes += inputs[i].type->bytes();
    out_bytes += outputs[i].type->bytes();
  }
  std::byte* packed = packing_room(node, workspace, in_bytes + out_bytes);
  std::byte* arrived = packed + in_bytes;
  sent.copy(device, inputs, packed, true);
  group.all_to_all(packed, sent.counts, arrived, received.counts, inputs[0].type->dtype);
  received.copy(device, outputs, arrived, false);
}

}  // namespace

std::optional<Message> message_of(const BoundNode& bound) {
  const Node& node = *bound.node;
  const bool sends = node.op_type == comm_op::kSend;
  if (!sends && node.op_type != comm_op::kRecv) {
    return std::nullopt;
  }
  Message message;
  message.peer = static_cast<int>(node.attributes.get_int("peer"));
  message.tag = static_cast<int>(node.attributes.get_int("tag", 0));
  message.sends = sends;
  message.bytes = (sends ? bound.inputs : bound.outputs)[0].type->bytes();
  message.room = sends ? bound.workspace : std::span<std::byte>();
  return message;
}

std::vector<Message> messages_of(BoundProgram& bound, const std::string& group) {
  std::vector<Message> messages;
  const auto add = [&](StepWindow window) {
    for (const Cell& cell : bound.program->row(window)) {
      for (const BoundPhase* phase : bound.phases_of(cell)) {
        for (const BoundNode& node : phase->nodes) {
          const std::optional<Message> message = message_of(node);
          if (message && node.node->attributes.get_string("group") == group) {
            messages.push_back(*message);
          }
        }
      }
    }
  };
  add(StepWindow::kWhole);
  if (bound.program->runs_on()) {
    add(StepWindow::kFill);
    add(StepWindow::kSteady);
    add(StepWindow::kDrain);
  }
  return messages;
}

Lane communication_lane(const BoundNode& node, const RankCommunicators& communicators) {
  const std::optional<Message> message = message_of(node);
  return message
             ? communicators.of_tensors(node.node->attributes.get_string("group")).lane_of(*message)
             : Lane::kCommunication;
}

void run_communication_node(const Node& node,
                            std::span<const TensorRef> inputs,
                            std::span<const TensorRef> outputs,
                            std::span<std::byte> workspace,
                            const RankCommunicators& communicators,
                            Device& device) {
  Communicator& group = communicators.of_tensors(node.attributes.get_string("group"));
  const std::string& type = node.op_type;
  const auto peer = [&] { return static_cast<int>(node.attributes.get_int("peer")); };
  const auto tag = [&] { return static_cast<int>(node.attributes.get_int("tag", 0)); };
  if (type == comm_op::kAllReduce) {
    all_reduce(node, inputs, outputs, group, device);
  } else if (type == comm_op::kReduceScatter) {
    reduce_scatter(node, inputs, outputs, workspace, group, device);
  } else if (type == comm_op::kAllGather) {
    all_gather(node, inputs, outputs, workspace, group, device);
  } else if (type == comm_op::kAllToAll) {
    all_to_all(node, inputs, outputs, workspace, group, device);
  } else if (type == comm_op::kBroadcast) {
    if (inputs[0].data != outputs[0].data) {
      device.copy(outputs[0].data, inputs[0].data, outputs[0].type->bytes(), Lane::kCommunication);
    }
    group.broadcast(outputs[0].data,
                    outputs[0].type->bytes(),
                    static_cast<int>(node.attributes.get_int("root", 0)));
  } else if (type == comm_op::kSend) {
    group.send(inputs[0].data, inputs[0].type->bytes(), peer(), tag());
  } else if (type == comm_op::kRecv) {
    group.recv(outputs[0].data, outputs[0].type->bytes(), peer(), tag());
  } else {
    TRAINRT_FAIL(
        kInternal, "node '", node.name, "': the executor does not know communication '", type, "'");
  }
}

double count_items(StepSums& sums, const RankCommunicators& communicators) {
  if (communicators.data != nullptr) {
    communicators.data->all_reduce(sums.items.data(),
                                   static_cast<int64_t>(sums.items.size()),
                                   DType::kFloat64,
                                   ReductionKind::kSum);
  }
  return std::accumulate(sums.items.begin(), sums.items.end(), 0.0);
}

namespace {

// What a rank has to say of the step's totals: added up over all ranks, they are it.
std::vector<double> said_of_step(const StepResult& totals,
                                 const StepSums& sums,
                                 const RankCoordinates& coordinates) {
  const bool speaks = coordinates.tensor_rank == 0;
  std::vector<double> said = sums.loss;
  said.insert(said.end(), sums.correct.begin(), sums.correct.end());
  if (!speaks) {
    said.assign(said.size(), 0.0);
  }
  said.push_back(speaks && coordinates.data_rank == 0 ? totals.item_count : 0);
  said.push_back(totals.has_correct ? 1.0 : 0.0);
  return said;
}

void take_totals(StepResult& totals, const std::vector<double>& all, size_t num_shards) {
  const auto correct = all.begin() + static_cast<std::ptrdiff_t>(num_shards);
  totals.loss_sum = std::accumulate(all.begin(), correct, 0.0);
  totals.correct = std::accumulate(correct, correct + static_cast<std::ptrdiff_t>(num_shards), 0.0);
  totals.item_count = all[2 * num_shards];
  totals.has_correct = all[2 * num_shards + 1] > 0;
}

}  // namespace

void combine_step(StepResult& totals,
                  const StepSums& sums,
                  const RankCoordinates& coordinates,
                  const RankCommunicators& communicators) {
  std::vector<double> all = said_of_step(totals, sums, coordinates);
  if (communicators.world != nullptr) {
    communicators.world->all_reduce(
        all.data(), static_cast<int64_t>(all.size()), DType::kFloat64, ReductionKind::kSum);
  }
  take_totals(totals, all, sums.loss.size());
}

void gather_step(StepResult& totals,
                 const StepSums& sums,
                 const RankCoordinates& coordinates,
                 const RankCommunicators& communicators) {
  std::vector<double> all = said_of_step(totals, sums, coordinates);
  Communicator& world = *communicators.world;
  const auto bytes = static_cast<int64_t>(all.size() * sizeof(double));
  if (world.rank() != 0) {
    world.send(all.data(), bytes, 0, kSumsTag);
    return;
  }
  std::vector<double> said(all.size());
  for (int rank = 1; rank < world.world_size(); ++rank) {
    world.recv(said.data(), bytes, rank, kSumsTag);
    std::transform(all.begin(), all.end(), said.begin(), all.begin(), std::plus<double>());
  }
  take_totals(totals, all, sums.loss.size());
}

}  // namespace trainrt
