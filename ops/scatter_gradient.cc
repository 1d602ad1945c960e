// With y_j = data_j combined with all updates u_i that go to place j:
//
//   none   d data is dy with what was overwritten set to 0, du_i = dy_j
//   add    d data = dy, du_i = dy_j
//   mul    d data_j = dy_j prod_i u_i, du_i = dy_j data_j prod_{k != i} u_k. The product of the
//          others is the product of all that are not 0, over u_i unless that is 0; it is 0 when
//          another one is 0.
//   max    dy_j goes to all that equal y_j in equal shares (so does PyTorch's scatter_reduce)
#include "ops/scatter_gradient.h"

namespace trainrt {

namespace {

// 1 where a equals b, else 0, in their type.
ValueId equal(GradientBuilder& g, ValueId a, ValueId b) {
  return g.cast(g.op("Equal", {a, b}), g.dtype(a));
}

void product_gradient(GradientBuilder& g, const ScatterAddressing& at) {
  const ValueId data = g.input(0), updates = g.input(2), dy = g.output_grad(0);
  if (g.needs_grad(0)) {
    const ValueId ones = g.fill(1, g.type(data));
    g.set_input_grad(0, g.mul(dy, at.scatter(ones, updates, "mul")));
  }
  if (g.needs_grad(2)) {
    const ValueId zero = g.scalar(0, g.dtype(updates));
    const ValueId is_zero = g.op("Equal", {updates, zero});
    const ValueId divisor = g.where(is_zero, g.scalar(1, g.dtype(updates)), updates);
    const ValueId zeros = g.cast(is_zero, g.dtype(updates));
    const ValueId zeros_at = at.gather(at.scatter(g.zeros_like(data), zeros, "add"));
    const ValueId product = at.gather(at.scatter(data, divisor, "mul"));
    const ValueId others_nonzero = g.op("Equal", {zeros_at, zeros});
    const ValueId others = g.where(others_nonzero, g.div(product, divisor), zero);
    g.set_input_grad(2, g.mul(at.gather(dy), others));
  }
}

void extremum_gradient(GradientBuilder& g, const ScatterAddressing& at) {
  const ValueId data = g.input(0), updates = g.input(2), y = g.output(0);
  const ValueId data_is = equal(g, data, y);
  const ValueId update_is = equal(g, updates, at.gather(y));
  const ValueId share = g.div(g.output_grad(0), at.scatter(data_is, update_is, "add"));
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.mul(share, data_is));
  }
  if (g.needs_grad(2)) {
    g.set_input_grad(2, g.mul(at.gather(share), update_is));
  }
}

}  // namespace

void scatter_gradient(GradientBuilder& g, const ScatterAddressing& at) {
  const std::string how = g.attributes().get_string("reduction", "none");
  if (how == "mul") {
    return product_gradient(g, at);
  }
  if (how == "max" || how == "min") {
    return extremum_gradient(g, at);
  }
  const ValueId dy = g.output_grad(0);
  if (g.needs_grad(0)) {
    g.set_input_grad(0, how == "add" ? dy : at.scatter(dy, g.fill(0, g.type(g.input(2))), "none"));
  }
  if (g.needs_grad(2)) {
    g.set_input_grad(2, at.gather(dy));
  }
}

}  // namespace trainrt
