// Gelu: x Phi(x) (Hendrycks & Gimpel, 2016), exactly by erf or, with `approximate` = "tanh", by
// x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), computed as x / (1 + e^(-2 u)): the same
// number for one exponential, without cancellation. GeluGrad(x, dy) computes either derivative.
//
// Fusions: the five-node form that exporters write before opset 20 (Div, Erf, Add, Mul, Mul in any
// order), and the tanh form (Pow or Mul cubes).
#include "ops/gelu.h"

#include <cmath>

#include "graph/autodiff.h"
#include "graph/passes/fusion.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

bool is_tanh(const Attributes& attributes) {
  const std::string approximate = attributes.get_string("approximate", "none");
  TRAINRT_REQUIRE(approximate == "none" || approximate == "tanh",
                  kInvalidModel,
                  "Gelu: approximate is '",
                  approximate,
                  "', wanted none or tanh");
  return approximate == "tanh";
}

// The functor is chosen by attribute, so each form has a loop of its own.
template <typename Exact, typename Approximate, size_t kNumInputs>
Kernel kernel(bool fast) {
  return [exact = elementwise::kernel<Exact, kNumInputs, Numbers::kFloating>(fast),
          approximate = elementwise::kernel<Approximate, kNumInputs, Numbers::kFloating>(fast)](
             KernelContext& context) {
    is_tanh(context.attributes()) ? approximate(context) : exact(context);
  };
}

std::vector<OpExample> examples(OpExample base) {
  std::vector<OpExample> list;
  for (const char* form : {"none", "tanh"}) {
    list.push_back(base);
    list.back().name = form;
    list.back().attributes = {{"approximate", std::string(form)}};
  }
  return list;
}

OpDef gelu_op() {
  OpDef op = unary_op<GeluErf>("Gelu");
  op.reference_kernel = kernel<GeluErf, GeluTanh, 1>(false);
  op.cpu_kernel = kernel<GeluErf, GeluTanh, 1>(true);
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 12); };
  op.gradient = gradient_from_input("GeluGrad");
  op.cheap = true;
  op.examples = examples(unary_example(-4, 4));
  return op;
}

OpDef gelu_grad_op() {
  OpDef op = unary_grad_op<GeluErfGrad>("GeluGrad");
  op.reference_kernel = kernel<GeluErfGrad, GeluTanhGrad, 2>(false);
  op.cpu_kernel = kernel<GeluErfGrad, GeluTanhGrad, 2>(true);
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 20); };
  op.examples = examples(grad_example(-4, 4));
  return op;
}

// com.microsoft.Gelu, FastGelu (tanh, optional bias) and BiasGelu (bias).
void upgrade_microsoft(UpgradeContext& u) {
  const ValueId x = u.has_input(1) ? u.add(u.input(0), u.input(1)) : u.input(0);
  u.set_outputs(u.emit(
      "Gelu", {x}, {{"approximate", std::string(u.op_type() == "FastGelu" ? "tanh" : "none")}}));
}

// ---- fusions ---------------------------------------------------------------------------------

bool near(std::optional<double> value, double wanted) {
  return value && std::fabs(*value - wanted) <= 1e-4 * std::fabs(wanted);
}

// Splits a product tree of Mul and Div by constants into its non-constant factors and one constant.
// Values with other readers end the walk: they must stay.
void collect_factors(const FusionContext& f,
                     ValueId value,
                     bool top,
                     std::vector<ValueId>& factors,
                     double& constant) {
  if (const std::optional<double> scalar = f.scalar_constant(value)) {
    constant *= *scalar;
    return;
  }
  if (top || f.single_use(value)) {
    if (const NodeId mul = f.producer(value, "Mul"); mul != kNoNode) {
      for (const ValueId input : f.graph().node(mul).inputs) {
        collect_factors(f, input, false, factors, constant);
      }
      return;
    }
    if (const NodeId div = f.producer(value, "Div"); div != kNoNode) {
      const std::vector<ValueId>& in = f.graph().node(div).inputs;
      if (const std::optional<double> scalar = f.scalar_constant(in[1])) {
        constant /= *scalar;
        collect_factors(f, in[0], false, factors, constant);
        return;
      }
    }
  }
  factors.push_back(value);
}

// If `value` is 1 + g(...), the node of g.
NodeId one_plus(const FusionContext& f, ValueId value, const char* function) {
  const NodeId add = f.producer(value, "Add");
  if (add == kNoNode || !f.single_use(value)) {
    return kNoNode;
  }
  const ValueId term =
      f.other_operand(add, [&](ValueId id) { return near(f.scalar_constant(id), 1); });
  return term != kNoValue && f.single_use(term) ? f.producer(term, function) : kNoNode;
}

bool is_product_of(
    const FusionContext& f, ValueId value, ValueId x, size_t power, double constant) {
  std::vector<ValueId> factors;
  double found = 1;
  collect_factors(f, value, true, factors, found);
  return near(found, constant) && factors == std::vector<ValueId>(power, x);
}

// x^3 times `constant`, with Pow or with Mul.
bool is_cube(const FusionContext& f, ValueId value, ValueId x, double constant) {
  std::vector<ValueId> factors;
  double found = 1;
  collect_factors(f, value, true, factors, found);
  if (!near(found, constant)) {
    return false;
  }
  if (factors == std::vector<ValueId>(3, x)) {
    return true;
  }
  if (factors.size() != 1) {
    return false;
  }
  const NodeId pow = f.producer(factors[0], "Pow");
  return pow != kNoNode && f.graph().node(pow).inputs[0] == x &&
         near(f.scalar_constant(f.graph().node(pow).inputs[1]), 3);
}

// sqrt(2 / pi) (x + 0.044715 x^3).
bool is_tanh_argument(const FusionContext& f, ValueId value, ValueId x) {
  std::vector<ValueId> factors;
  double constant = 1;
  collect_factors(f, value, true, factors, constant);
  if (factors.size() != 1 || !near(constant, kSqrtTwoOverPi)) {
    return false;
  }
  const NodeId add = f.producer(factors[0], "Add");
  if (add == kNoNode) {
    return false;
  }
  const ValueId cube = f.other_operand(add, [&](ValueId id) { return id == x; });
  return cube != kNoValue && is_cube(f, cube, x, kCubic);
}

// 0.5 x (1 + erf(x / sqrt(2))) or its tanh form, the product in any order.
bool fuse(FusionContext& f) {
  const ValueId y = f.graph().node(f.root()).outputs[0];
  std::vector<ValueId> factors;
  double constant = 1;
  collect_factors(f, y, true, factors, constant);
  if (factors.size() != 2 || !near(constant, 0.5)) {
    return false;
  }
  for (const size_t i : {0u, 1u}) {
    const ValueId x = factors[1 - i];
    const NodeId erf = one_plus(f, factors[i], "Erf");
    if (erf != kNoNode && is_product_of(f, f.graph().node(erf).inputs[0], x, 1, kSqrtHalf)) {
      f.replace(y, f.op("Gelu", {x}, {{"approximate", std::string("none")}}));
      return true;
    }
    const NodeId tanh = one_plus(f, factors[i], "Tanh");
    if (tanh != kNoNode && is_tanh_argument(f, f.graph().node(tanh).inputs[0], x)) {
      f.replace(y, f.op("Gelu", {x}, {{"approximate", std::string("tanh")}}));
      return true;
    }
  }
  return false;
}

const RegisterOp kGelu{gelu_op()};
const RegisterOp kGeluGrad{gelu_grad_op()};
const RegisterUpgrade kMicrosoftGelu{"com.microsoft", "Gelu", upgrade_microsoft};
const RegisterUpgrade kBiasGelu{"com.microsoft", "BiasGelu", upgrade_microsoft};
const RegisterUpgrade kFastGelu{"com.microsoft", "FastGelu", upgrade_microsoft};
const RegisterFusion kGeluFusion{{"Gelu", "Mul", 20, fuse}};

}  // namespace

}  // namespace trainrt
