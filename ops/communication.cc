// Communication as operators: types and cost, so that a program's collectives are nodes like any
// other. The executor carries them out through the communicator of their group; there is no kernel.
//
// AllReduce, ReduceScatter, AllGather and AllToAll take several tensors as well (a bucket): output
// i is input i's, and `sizes` (`concat_sizes`) holds those of each tensor, one after the other.
#include <numeric>

#include "graph/op_def.h"

namespace trainrt {

namespace {

Shape with_extent(Shape shape, const OpContext& op, int64_t extent) {
  const int axis =
      normalize_axis(op.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
  shape[static_cast<size_t>(axis)] = extent;
  return shape;
}

// How tensor i is cut over the ranks: `axis` has the sum of these whole, sizes[index] on one rank.
std::vector<int64_t> sizes_of(const OpContext& op, int i, const char* name = "sizes") {
  const std::vector<int64_t>& all = op.attributes().get_ints(name);
  const auto degree = static_cast<std::ptrdiff_t>(all.size()) / op.num_inputs();
  const auto begin = all.begin() + i * degree;
  return {begin, begin + degree};
}

int64_t whole_size(const OpContext& op, int i) {
  const std::vector<int64_t> sizes = sizes_of(op, i);
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t own_size(const OpContext& op, int i) {
  return sizes_of(op, i).at(static_cast<size_t>(op.attributes().get_int("index")));
}

// Each tensor's `axis` changes from `before` to `after`.
TensorTypes with_extents(const OpContext& op,
                         int64_t (*before)(const OpContext&, int),
                         int64_t (*after)(const OpContext&, int)) {
  TensorTypes types;
  for (int i = 0; i < op.num_inputs(); ++i) {
    const Shape& shape = op.input_shape(i);
    const int axis =
        normalize_axis(op.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
    TRAINRT_REQUIRE(shape[static_cast<size_t>(axis)] == before(op, i),
                    kInvalidModel,
                    op.node().op_type,
                    ": input ",
                    i,
                    " has ",
                    shape[static_cast<size_t>(axis)],
                    " along its axis, wanted ",
                    before(op, i));
    types.push_back({op.input_dtype(i), with_extent(shape, op, after(op, i))});
  }
  return types;
}

// Segments lie one after the other in a communicator's buffer; along an axis that is not the
// outermost they have to be packed, which buckets never are.
bool needs_packing(const OpContext& op) {
  return dims_product(op.input_shape(0), 0, op.axis(0)) > 1;
}

Cost traffic(const OpContext& op) {
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  return cost;
}

// Collectives are inserted by partitioning and never partitioned themselves.
ShardingRule never_sharded(const OpContext& op) {
  return Factors::whole(op);
}

OpDef communication(const char* name, std::function<TensorTypes(const OpContext&)> infer_types) {
  OpDef op;
  op.name = name;
  op.infer_types = std::move(infer_types);
  op.cost = traffic;
  op.sharding = never_sharded;
  op.not_differentiable = true;
  op.effect = true;
  return op;
}

OpDef same_types(const char* name) {
  OpDef op = communication(name, [](const OpContext& c) {
    TensorTypes types;
    for (int i = 0; i < c.num_inputs(); ++i) {
      types.push_back(c.input_type(i));
    }
    return types;
  });
  op.inplace = {{0, 0, false}};  // of a bucket: parallel/program.h
  return op;
}

OpDef all_gather() {
  OpDef op = communication(
      "AllGather", [](const OpContext& c) { return with_extents(c, own_size, whole_size); });
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return needs_packing(c) ? c.output_type(0).bytes() : 0;
  };
  return op;
}

OpDef reduce_scatter() {
  OpDef op = communication(
      "ReduceScatter", [](const OpContext& c) { return with_extents(c, whole_size, own_size); });
  // What is written over its input (parallel/program.h) waits until the others have read that.
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return needs_packing(c)                             ? c.input_type(0).bytes()
           : c.attributes().get_int("in_place", 0) != 0 ? c.output_bytes()
                                                        : 0;
  };
  return op;
}

// `axis` is cut by `sizes` on the way in, `concat_axis` grows on the way out.
OpDef all_to_all() {
  OpDef op = communication("AllToAll", [](const OpContext& c) -> TensorTypes {
    TensorTypes types;
    for (int i = 0; i < c.num_inputs(); ++i) {
      Shape shape = with_extent(c.input_shape(i), c, own_size(c, i));
      const int grown =
          normalize_axis(c.attributes().get_int("concat_axis"), static_cast<int>(shape.size()));
      const std::vector<int64_t> sizes = sizes_of(c, i, "concat_sizes");
      shape[static_cast<size_t>(grown)] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      types.push_back({c.input_dtype(i), std::move(shape)});
    }
    return types;
  });
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return c.input_bytes() + c.output_bytes();
  };
  return op;
}

OpDef send() {
  return communication("Send", [](const OpContext&) -> TensorTypes { return {}; });
}

OpDef recv() {
  return communication("Recv", [](const OpContext& c) -> TensorTypes {
    const std::string& name = c.attributes().get_string("dtype");
    const std::optional<DType> dtype = dtype_from_name(name);
    TRAINRT_REQUIRE(dtype.has_value(), kInvalidModel, "Recv: unknown dtype '", name, "'");
    return {{*dtype, c.attributes().get_ints("shape")}};
  });
}

const RegisterOp kAllReduce{same_types("AllReduce")};
const RegisterOp kBroadcast{same_types("Broadcast")};
const RegisterOp kAllGather{all_gather()};
const RegisterOp kReduceScatter{reduce_scatter()};
const RegisterOp kAllToAll{all_to_all()};
const RegisterOp kSend{send()};
const RegisterOp kRecv{recv()};

}  // namespace

}  // namespace trainrt
