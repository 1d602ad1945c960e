// Writes forward graphs by hand for tests of plans.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "graph/graph_builder.h"
#include "graph/random.h"

namespace trainrt::testing {

// Writes models: parameters with fixed pseudo-random contents, nodes numbered for the stages.
class ModelWriter : public GraphBuilder {
 public:
  explicit ModelWriter(Graph& graph, DType dtype) : GraphBuilder(graph), dtype_(dtype) {}

  ValueId parameter(const std::string& name, Shape shape) {
    Value value;
    value.name = name;
    value.type = {dtype_, shape};
    value.kind = ValueKind::kParameter;
    value.source.description = "drawn";
    value.source.load = [name, shape, dtype = dtype_] {
      Tensor tensor(DType::kFloat64, shape);
      const double scale = 1 / std::sqrt(static_cast<double>(shape.at(0)));
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        const RandomBlock block = philox(hash_name(name), static_cast<uint64_t>(i), 0);
        tensor.data<double>()[i] = scale * (2 * uniform_double(block[0], block[1]) - 1);
      }
      return tensor.cast(dtype);
    };
    return graph_.add_value(std::move(value));
  }

  // Every node gets a source index of its own, as the nodes of an imported graph have.
  ValueId emit(const std::string& op_type,
               const std::vector<ValueId>& inputs,
               Attributes attributes = {}) {
    set_source_index(next_++);
    return op(op_type, inputs, std::move(attributes), concat("n", next_, "_", op_type));
  }
  ValueId linear(const std::string& name, ValueId x, int64_t in, int64_t out) {
    const ValueId product = emit("MatMul", {x, parameter(name + ".w", {in, out})});
    return emit("Add", {product, parameter(name + ".b", {out})});
  }
  int num_nodes() const { return next_; }

 private:
  DType dtype_;
  int next_ = 0;
};

}  // namespace trainrt::testing
