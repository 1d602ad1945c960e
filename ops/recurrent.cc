// The recurrence of ONNX's LSTM, GRU and RNN over one direction; what is not recurrent is ordinary
// nodes around it (one large MatMul of all inputs with W, slices of the weights, the concatenation
// of two directions), so that it is planned, split and differentiated like everything else.
//
//   Recurrent(xproj[t, n, g h], r[g h, h], rb[g h], h0[n, h][, c0][, p[3 h]][, lens[n] int32])
//     -> y[t, n, h], h_n[n, h]          and for `cell` = lstm also c_n[n, h], c_all[t, n, h]
//   RecurrentGrad(the inputs, y, c_all, dy, dh_n, dc_n, dc_all)
//     -> dxproj, h before each step, dh0, then for lstm: dc0, dp; for gru: gradient of the
//     recurrent
//        product, reset gate times h
//
// xproj is x . w^T + wb; g gates in ONNX's order (lstm: i o f c, gru: z r h). The gradient of r is
// a product of two of RecurrentGrad's outputs over all steps and samples at once.
#include "ops/recurrent.h"

#include <algorithm>
#include <cctype>

#include "graph/autodiff.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace recurrent {

namespace {

// Name, kind, and ONNX's defaults of alpha and beta.
struct ActivationRow {
  const char* name;
  Activation::Kind kind;
  double alpha, beta;
};
const ActivationRow kActivations[] = {
    {"tanh", Activation::Kind::kTanh, 0, 0},
    {"sigmoid", Activation::Kind::kSigmoid, 0, 0},
    {"relu", Activation::Kind::kRelu, 0, 0},
    {"affine", Activation::Kind::kAffine, 1, 0},
    {"leakyrelu", Activation::Kind::kLeakyRelu, 0.01, 0},
    {"thresholdedrelu", Activation::Kind::kThresholdedRelu, 1, 0},
    {"scaledtanh", Activation::Kind::kScaledTanh, 1, 1},
    {"hardsigmoid", Activation::Kind::kHardSigmoid, 0.2, 0.5},
    {"elu", Activation::Kind::kElu, 1, 0},
    {"softsign", Activation::Kind::kSoftsign, 0, 0},
    {"softplus", Activation::Kind::kSoftplus, 0, 0},
};

const ActivationRow& row_of(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  for (const ActivationRow& row : kActivations) {
    if (name == row.name) {
      return row;
    }
  }
  TRAINRT_FAIL(kUnsupported, "activation '", name, "' of a recurrent layer is not known");
}

}  // namespace

Activation activation_from_name(const std::string& name, double alpha, double beta) {
  return {row_of(name).kind, alpha, beta};
}

void default_parameters(const std::string& name, double& alpha, double& beta) {
  alpha = row_of(name).alpha;
  beta = row_of(name).beta;
}

Cell cell_of(const Attributes& attributes, const Shape& xproj) {
  Cell cell;
  const std::string kind = attributes.get_string("cell");
  TRAINRT_REQUIRE(kind == "lstm" || kind == "gru" || kind == "rnn",
                  kInvalidModel,
                  "Recurrent: cell '",
                  kind,
                  "' is none of lstm, gru, rnn");
  cell.kind = kind == "lstm" ? CellKind::kLstm : kind == "gru" ? CellKind::kGru : CellKind::kRnn;
  const std::vector<std::string> names = attributes.get_strings("activations", {});
  const std::vector<double> alphas = attributes.get_floats("alphas", {});
  const std::vector<double> betas = attributes.get_floats("betas", {});
  const size_t wanted = kind == "lstm" ? 3 : kind == "gru" ? 2 : 1;
  TRAINRT_REQUIRE(names.size() == wanted && alphas.size() == wanted && betas.size() == wanted,
                  kInvalidModel,
                  "Recurrent: ",
                  kind,
                  " wants ",
                  wanted,
                  " activations with alphas and betas, got ",
                  names.size());
  for (size_t i = 0; i < wanted; ++i) {
    cell.activations.push_back(activation_from_name(names[i], alphas[i], betas[i]));
  }
  cell.reverse = attributes.get_int("reverse", 0) != 0;
  cell.linear_before_reset = attributes.get_int("linear_before_reset", 0) != 0;
  cell.input_forget = attributes.get_int("input_forget", 0) != 0;
  cell.clip = attributes.get_float("clip", 0);
  TRAINRT_REQUIRE(xproj.size() == 3 && xproj[2] % cell.gates() == 0,
                  kInvalidModel,
                  "Recurrent: xproj is ",
                  shape_string(xproj),
                  ", wanted [steps, batch, ",
                  cell.gates(),
                  " * hidden]");
  cell.steps = xproj[0];
  cell.batch = xproj[1];
  cell.hidden = xproj[2] / cell.gates();
  return cell;
}

}  // namespace recurrent

namespace {

using namespace recurrent;  // NOLINT(google-build-using-namespace): this file describes it

Cell cell_of(const OpContext& op) {
  return recurrent::cell_of(op.attributes(), op.input_shape(kXproj));
}

TensorTypes infer_forward(const OpContext& op) {
  const Cell cell = cell_of(op);
  const DType dtype = op.input_dtype(kXproj);
  TRAINRT_REQUIRE(is_floating(dtype), kInvalidModel, "Recurrent wants floating-point tensors");
  const int64_t width = cell.gates() * cell.hidden;
  const auto require = [&](int i, const char* name, const Shape& wanted) {
    TRAINRT_REQUIRE(!op.has_input(i) || op.input_shape(i) == wanted,
                    kInvalidModel,
                    "Recurrent: ",
                    name,
                    " is ",
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    shape_string(wanted));
  };
  require(kR, "r", {width, cell.hidden});
  require(kRb, "rb", {width});
  require(kH0, "h0", {cell.batch, cell.hidden});
  require(kC0, "c0", {cell.batch, cell.hidden});
  require(kP, "p", {3 * cell.hidden});
  require(kLens, "lens", {cell.batch});
  TRAINRT_REQUIRE(!op.has_input(kLens) || op.input_dtype(kLens) == DType::kInt32,
                  kInvalidModel,
                  "Recurrent: lens is ",
                  dtype_name(op.input_dtype(kLens)),
                  ", wanted int32");
  TRAINRT_REQUIRE(op.has_input(kH0) && (cell.kind != CellKind::kLstm || op.has_input(kC0)),
                  kInvalidModel,
                  "Recurrent: the initial state is missing");
  const TensorType all{dtype, {cell.steps, cell.batch, cell.hidden}};
  const TensorType last{dtype, {cell.batch, cell.hidden}};
  if (cell.kind == CellKind::kLstm) {
    return {all, last, last, all};
  }
  return {all, last};
}

TensorTypes infer_backward(const OpContext& op) {
  const Cell cell = cell_of(op);
  const DType dtype = op.input_dtype(kXproj);
  const TensorType all{dtype, {cell.steps, cell.batch, cell.hidden}};
  const TensorType last{dtype, {cell.batch, cell.hidden}};
  TensorTypes types = {op.input_type(kXproj), all, last};
  if (cell.kind == CellKind::kLstm) {
    types.push_back(last);
    types.push_back({dtype, {3 * cell.hidden}});
  } else if (cell.kind == CellKind::kGru) {
    types.push_back(op.input_type(kXproj));
    types.push_back(all);
  }
  return types;
}

std::string joined(const std::vector<std::string>& parts, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ", ") + parts[i];
  }
  return text;
}

// Samples are independent; everything else stays together.
ShardingRule sharding(const OpContext& op) {
  const Cell cell = cell_of(op);
  const bool grad = op.node().op_type == "RecurrentGrad";
  const bool lstm = cell.kind == CellKind::kLstm;
  const std::vector<std::string> inputs = {"t n w",
                                           "w h",
                                           "w",
                                           "n h",
                                           "n h",
                                           "q",
                                           "n",
                                           "t n h",
                                           "t n h",
                                           "t n h",
                                           "n h",
                                           "n h",
                                           "t n h"};
  std::vector<std::string> outputs = {"t n h", "n h", "n h", "t n h"};
  size_t num_outputs = lstm ? 4 : 2;
  if (grad) {
    outputs = {"t n w", "t n h", "n h", lstm ? "n h" : "t n w", lstm ? "q" : "t n h"};
    num_outputs = cell.kind == CellKind::kRnn ? 3 : 5;
  }
  Factors factors(
      op,
      joined(inputs, static_cast<size_t>(op.num_inputs())) + " -> " + joined(outputs, num_outputs));
  factors.whole("t").whole("w").whole("h");
  if (op.has_input(kP) || (grad && lstm && op.has_output(4))) {
    factors.whole("q");
  }
  if (grad && lstm) {
    factors.reduction("n");  // dp
  }
  return factors;
}

Cost cost(const OpContext& op) {
  const Cell cell = cell_of(op);
  const bool grad = op.node().op_type == "RecurrentGrad";
  const int64_t width = cell.gates() * cell.hidden;
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  cost.flops = (grad ? 24.0 : 12.0) * static_cast<double>(op.num_elements(kXproj));
  cost.matmuls = {{cell.steps, cell.batch, width, cell.hidden}};
  if (grad) {
    cost.matmuls.push_back({cell.steps, cell.batch, cell.hidden, width});
  }
  return cost;
}

// dr from the gradient of the recurrent product and what it was a product with.
ValueId weight_gradient(GradientBuilder& g, const Cell& cell, const std::vector<ValueId>& grads) {
  if (cell.kind != CellKind::kGru || cell.linear_before_reset) {
    const ValueId drec = cell.kind == CellKind::kGru ? grads[3] : grads[0];
    return g.op("MatMulWeightGrad", {drec, grads[1]});
  }
  // The candidate multiplies r with the reset state, the gates with the state itself.
  const auto columns = [&](int64_t first, int64_t last) {
    return g.op(
        "Slice",
        {grads[3]},
        {{"starts", Shape{first}}, {"ends", Shape{last}}, {"axes", Shape{2}}, {"steps", Shape{1}}});
  };
  const int64_t n = cell.hidden;
  const ValueId gates = g.op("MatMulWeightGrad", {columns(0, 2 * n), grads[1]});
  const ValueId candidate = g.op("MatMulWeightGrad", {columns(2 * n, 3 * n), grads[4]});
  return g.op("Concat", {gates, candidate}, {{"axis", int64_t{0}}});
}

void gradient(GradientBuilder& g) {
  const Cell cell = recurrent::cell_of(g.attributes(), g.input_shape(kXproj));
  const bool lstm = cell.kind == CellKind::kLstm, gru = cell.kind == CellKind::kGru;
  TRAINRT_REQUIRE(
      cell.clip == 0, kUnsupported, "recurrent layers with a clip have no gradient here");
  std::vector<ValueId> inputs;
  for (int i = 0; i <= kLens; ++i) {
    inputs.push_back(g.input(i));
  }
  inputs.push_back(g.saved_output(0));
  inputs.push_back(lstm ? g.saved_output(3) : kNoValue);
  for (const int output : {0, 1, 2, 3}) {
    inputs.push_back(output < g.num_outputs() ? g.output_grad(output) : kNoValue);
  }
  const std::vector<ValueId> grads = g.node("RecurrentGrad", inputs, g.attributes());
  if (g.needs_grad(kXproj)) {
    g.set_input_grad(kXproj, grads[0]);
  }
  if (g.needs_grad(kR)) {
    g.set_input_grad(kR, weight_gradient(g, cell, grads));
  }
  if (g.needs_grad(kRb)) {
    g.set_input_grad(kRb, g.reduce_sum(gru ? grads[3] : grads[0], {0, 1}, /*keepdims=*/false));
  }
  if (g.needs_grad(kH0)) {
    g.set_input_grad(kH0, grads[2]);
  }
  if (lstm && g.needs_grad(kC0)) {
    g.set_input_grad(kC0, grads[3]);
  }
  if (lstm && g.needs_grad(kP)) {
    g.set_input_grad(kP, grads[4]);
  }
}

std::vector<OpExample> forward_examples() {
  struct Case {
    const char *name, *cell;
    int64_t gates;
    std::vector<std::string> activations;
    bool reverse, linear_before_reset, peepholes, lens;
  };
  const std::vector<Case> cases = {
      {"lstm", "lstm", 4, {"sigmoid", "tanh", "tanh"}, false, false, false, false},
      {"lstm_reverse_with_peepholes_and_lengths",
       "lstm",
       4,
       {"sigmoid", "tanh", "tanh"},
       true,
       false,
       true,
       true},
      {"gru", "gru", 3, {"sigmoid", "tanh"}, false, false, false, false},
      {"gru_linear_before_reset", "gru", 3, {"sigmoid", "tanh"}, true, true, false, true},
      {"rnn", "rnn", 1, {"tanh"}, false, false, false, true},
      {"rnn_softsign", "rnn", 1, {"softsign"}, true, false, false, false},
  };
  const auto f32 = [](Shape shape) { return TensorType{DType::kFloat32, std::move(shape)}; };
  std::vector<OpExample> list;
  for (const Case& c : cases) {
    const int64_t steps = 4, batch = 18, n = 3, width = c.gates * n;
    const std::vector<double> zeros(c.activations.size(), 0.0);
    OpExample example;
    example.name = c.name;
    example.attributes = {{"cell", std::string(c.cell)},
                          {"activations", c.activations},
                          {"alphas", zeros},
                          {"betas", zeros},
                          {"reverse", int64_t{c.reverse}},
                          {"linear_before_reset", int64_t{c.linear_before_reset}}};
    example.inputs = {f32({steps, batch, width}),
                      f32({width, n}),
                      f32({width}),
                      f32({batch, n}),
                      f32({batch, n}),
                      f32({3 * n}),
                      {DType::kInt32, {batch}}};
    example.values.resize(7);
    std::vector<int32_t> lens;
    for (int32_t i = 0; i < 18; ++i) {
      lens.push_back(1 + i % 4);
    }
    example.values[6] = Tensor::from(lens, {batch});
    if (std::string(c.cell) != "lstm") {
      example.absent.push_back(kC0);
    }
    if (!c.peepholes) {
      example.absent.push_back(kP);
    }
    if (!c.lens) {
      example.absent.push_back(kLens);
    }
    list.push_back(std::move(example));
  }
  return list;
}

// y and c_all are drawn: any states will do for an agreement of kernels.
std::vector<OpExample> backward_examples() {
  std::vector<OpExample> list = forward_examples();
  for (OpExample& example : list) {
    const bool lstm = example.attributes.get_string("cell") == "lstm";
    const TensorType last = example.inputs[kH0];
    const TensorType all{DType::kFloat32, {4, 18, 3}};
    for (const TensorType& type : {all, all, all, last, last, all}) {
      example.inputs.push_back(type);
    }
    example.values.resize(example.inputs.size());
    if (!lstm) {
      example.absent.insert(example.absent.end(), {kCAll, kDcN, kDcAll});
    }
  }
  return list;
}

OpDef recurrent_op() {
  OpDef op;
  op.name = "Recurrent";
  op.infer_types = infer_forward;
  op.cost = cost;
  op.sharding = sharding;
  op.reference_kernel = forward_reference;
  op.gradient = gradient;
  op.workspace = forward_workspace;
  op.cpu_kernel = forward_fast;
  op.examples = forward_examples();
  return op;
}

OpDef recurrent_grad_op() {
  OpDef op;
  op.name = "RecurrentGrad";
  op.infer_types = infer_backward;
  op.cost = cost;
  op.sharding = sharding;
  op.reference_kernel = backward_reference;
  op.workspace = backward_workspace;
  op.cpu_kernel = backward_fast;
  op.examples = backward_examples();
  return op;
}

const RegisterOp kRecurrent{recurrent_op()};
const RegisterOp kRecurrentGrad{recurrent_grad_op()};

}  // namespace

}  // namespace trainrt
