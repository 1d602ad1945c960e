// Communication as operators: types and cost, so that a program's collectives are nodes like any
// other. The executor carries them out through the communicator of their group; there is no kernel.
#include "graph/op_def.h"

namespace trainrt {

namespace {

// The extent of `axis` is the sum of `sizes` whole, and sizes[index] on one rank.
Shape with_extent(Shape shape, const OpContext& op, int64_t extent) {
  const int axis =
      normalize_axis(op.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
  shape[static_cast<size_t>(axis)] = extent;
  return shape;
}

int64_t sum_of_sizes(const OpContext& op) {
  int64_t sum = 0;
  for (const int64_t size : op.attributes().get_ints("sizes")) {
    sum += size;
  }
  return sum;
}

int64_t own_size(const OpContext& op) {
  const std::vector<int64_t>& sizes = op.attributes().get_ints("sizes");
  return sizes.at(static_cast<size_t>(op.attributes().get_int("index")));
}

int64_t axis_extent(const OpContext& op) {
  return op.input_shape(0).at(static_cast<size_t>(op.axis(0)));
}

// Segments lie one after the other in a communicator's buffer; along an axis that is not the
// outermost they have to be packed.
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

OpDef same_type(const char* name) {
  OpDef op =
      communication(name, [](const OpContext& c) -> TensorTypes { return {c.input_type(0)}; });
  op.inplace = {{0, 0, false}};
  return op;
}

OpDef all_gather() {
  OpDef op = communication("AllGather", [](const OpContext& c) -> TensorTypes {
    TRAINRT_REQUIRE(axis_extent(c) == own_size(c),
                    kInvalidModel,
                    "AllGather: input has ",
                    axis_extent(c),
                    " along its axis, wanted ",
                    own_size(c));
    return {{c.input_dtype(0), with_extent(c.input_shape(0), c, sum_of_sizes(c))}};
  });
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return needs_packing(c) ? c.output_type(0).bytes() : 0;
  };
  return op;
}

OpDef reduce_scatter() {
  OpDef op = communication("ReduceScatter", [](const OpContext& c) -> TensorTypes {
    TRAINRT_REQUIRE(axis_extent(c) == sum_of_sizes(c),
                    kInvalidModel,
                    "ReduceScatter: input has ",
                    axis_extent(c),
                    " along its axis, the sizes add up to ",
                    sum_of_sizes(c));
    return {{c.input_dtype(0), with_extent(c.input_shape(0), c, own_size(c))}};
  });
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return needs_packing(c) ? c.input_type(0).bytes() : 0;
  };
  return op;
}

// `axis` is cut by `sizes` on the way in, `concat_axis` grows on the way out.
OpDef all_to_all() {
  OpDef op = communication("AllToAll", [](const OpContext& c) -> TensorTypes {
    Shape shape = with_extent(c.input_shape(0), c, own_size(c));
    const int grown =
        normalize_axis(c.attributes().get_int("concat_axis"), static_cast<int>(shape.size()));
    int64_t extent = 0;
    for (const int64_t size : c.attributes().get_ints("concat_sizes")) {
      extent += size;
    }
    shape[static_cast<size_t>(grown)] = extent;
    return {{c.input_dtype(0), std::move(shape)}};
  });
  op.workspace = [](const OpContext& c, const DeviceSpec&) {
    return c.input_type(0).bytes() + c.output_type(0).bytes();
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

const RegisterOp kAllReduce{same_type("AllReduce")};
const RegisterOp kBroadcast{same_type("Broadcast")};
const RegisterOp kAllGather{all_gather()};
const RegisterOp kReduceScatter{reduce_scatter()};
const RegisterOp kAllToAll{all_to_all()};
const RegisterOp kSend{send()};
const RegisterOp kRecv{recv()};

}  // namespace

}  // namespace trainrt
