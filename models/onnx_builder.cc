#include "models/onnx_builder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "graph/random.h"

namespace trainrt {

namespace {

// Elements [2 * first, 2 * last) of a weight, as far as there are such.
void draw_blocks(uint64_t key,
                 const std::string& kind,
                 double parameter,
                 int64_t first,
                 int64_t last,
                 Tensor& tensor) {
  float* data = tensor.data<float>();
  const int64_t count = tensor.num_elements();
  for (int64_t block = first; block < last; ++block) {
    const RandomBlock words = philox(key, static_cast<uint64_t>(block), 0);
    for (int64_t i = 0; i < 2 && block * 2 + i < count; ++i) {
      const uint32_t a = words[static_cast<size_t>(2 * i)];
      const uint32_t b = words[static_cast<size_t>(2 * i + 1)];
      const double unit = kind == "normal" ? normal_double(a, b) : 2 * uniform_double(a, b) - 1;
      data[block * 2 + i] = static_cast<float>(parameter * unit);
    }
  }
}

// Element i of a weight depends on (seed, name, i) alone, so any piece of it can be drawn anywhere:
// a large one by all cores.
Tensor draw(uint64_t key, const Shape& shape, const std::string& kind, double parameter) {
  Tensor tensor(DType::kFloat32, shape);
  float* data = tensor.data<float>();
  const int64_t count = tensor.num_elements();
  if (kind == "fill") {
    std::fill(data, data + count, static_cast<float>(parameter));
    return tensor;
  }
  constexpr int64_t kLeastOfThread = 1 << 17;  // blocks; milliseconds of work
  const int64_t blocks = (count + 1) / 2;
  const int64_t threads = std::clamp<int64_t>(
      blocks / kLeastOfThread, 1, std::max(1u, std::thread::hardware_concurrency()));
  const auto draw_part = [&](int64_t part) {
    draw_blocks(
        key, kind, parameter, blocks * part / threads, blocks * (part + 1) / threads, tensor);
  };
  std::vector<std::jthread> others;
  for (int64_t part = 1; part < threads; ++part) {
    others.emplace_back(draw_part, part);
  }
  draw_part(0);
  others.clear();
  return tensor;
}

}  // namespace

void require_multiple(int64_t value, const char* name, int64_t divisor, const char* divisor_name) {
  TRAINRT_REQUIRE(value > 0 && divisor > 0 && value % divisor == 0,
                  kInvalidArgument,
                  name,
                  " = ",
                  value,
                  " must be a positive multiple of ",
                  divisor_name,
                  " = ",
                  divisor);
}

void require_image(int64_t image, int64_t least, const std::string& model) {
  TRAINRT_REQUIRE(image >= least,
                  kInvalidArgument,
                  "image = ",
                  image,
                  " leaves ",
                  model,
                  " no pixel after its strides; wanted at least ",
                  least);
}

int64_t side_for_halvings(int64_t layers, const std::string& model) {
  constexpr int64_t kMostHalvings = 29;  // of the largest image that is taken, 1e9 pixels wide
  TRAINRT_REQUIRE(layers <= kMostHalvings,
                  kInvalidArgument,
                  "layers = ",
                  layers,
                  " of ",
                  model,
                  " halve the image more often than any has pixels for; wanted at most ",
                  kMostHalvings);
  return int64_t{1} << layers;
}

void OnnxBuilder::output(ValueId id, const std::string& name) {
  graph_.rename_value(id, name);
  graph_.outputs().push_back(id);
}

ValueId OnnxBuilder::weight(const std::string& name,
                            Shape shape,
                            const std::string& kind,
                            double parameter) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat32, shape};
  value.kind = ValueKind::kParameter;
  const uint64_t key = mix_keys(seed_, hash_name(name));
  value.source = {kind,
                  [key, shape, kind, parameter] { return draw(key, shape, kind, parameter); }};
  return graph_.add_value(std::move(value));
}

ValueId OnnxBuilder::normal(const std::string& name, Shape shape, double stddev) {
  return weight(name, std::move(shape), "normal", stddev);
}

ValueId OnnxBuilder::uniform(const std::string& name, Shape shape, double bound) {
  return weight(name, std::move(shape), "uniform", bound);
}

ValueId OnnxBuilder::filled(const std::string& name, Shape shape, double value) {
  return weight(name, std::move(shape), "fill", value);
}

ValueId OnnxBuilder::state(const std::string& name, Shape shape, double value) {
  const ValueId id = filled(name, std::move(shape), value);
  graph_.value(id).kind = ValueKind::kState;
  return id;
}

ValueId OnnxBuilder::constant(Tensor data) {
  return graph_.add_constant(graph_.unique_value_name("constant"), std::move(data));
}

std::vector<ValueId> OnnxBuilder::node(const std::string& op_type,
                                       const std::vector<ValueId>& inputs,
                                       const TensorTypes& types,
                                       Attributes attributes,
                                       const std::string& name) {
  Node node;
  node.name = graph_.unique_node_name(name.empty() ? op_type : name);
  node.op_type = op_type;
  node.inputs = inputs;
  node.attributes = std::move(attributes);
  const NodeId id = graph_.add_node(std::move(node), types);
  return graph_.node(id).outputs;
}

ValueId OnnxBuilder::op(const std::string& op_type,
                        const std::vector<ValueId>& inputs,
                        Shape shape,
                        Attributes attributes,
                        const std::string& name) {
  const DType type = inputs.empty() ? DType::kFloat32 : dtype(inputs[0]);
  return node(op_type, inputs, {{type, std::move(shape)}}, std::move(attributes), name).at(0);
}

ValueId OnnxBuilder::unary(const std::string& op_type, ValueId x, Attributes attributes) {
  return op(op_type, {x}, shape(x), std::move(attributes));
}

ValueId OnnxBuilder::binary(const std::string& op_type, ValueId a, ValueId b) {
  return op(op_type, {a, b}, broadcast_shapes(shape(a), shape(b)));
}

ValueId OnnxBuilder::reshape(ValueId x, Shape target) {
  TRAINRT_CHECK(num_elements(target) == num_elements(shape(x)));
  Shape written = target;
  written[0] = 0;
  if (symbolic_seq_) {
    TRAINRT_CHECK(target.at(1) == shape(x).at(1));
    written[1] = 0;
  }
  const Tensor dims = Tensor::from(written, {static_cast<int64_t>(written.size())});
  return op("Reshape", {x, constant(dims)}, std::move(target));
}

ValueId OnnxBuilder::transpose(ValueId x, std::vector<int64_t> perm) {
  Shape out;
  for (const int64_t axis : perm) {
    out.push_back(shape(x)[static_cast<size_t>(axis)]);
  }
  return op("Transpose", {x}, std::move(out), {{"perm", std::move(perm)}});
}

ValueId OnnxBuilder::concat(const std::vector<ValueId>& xs, int axis) {
  Shape out = shape(xs.at(0));
  out[static_cast<size_t>(axis)] = 0;
  for (const ValueId x : xs) {
    out[static_cast<size_t>(axis)] += shape(x)[static_cast<size_t>(axis)];
  }
  return op("Concat", xs, std::move(out), {{"axis", int64_t{axis}}});
}

ValueId OnnxBuilder::slice(ValueId x, int axis, int64_t start, int64_t end) {
  Shape out = shape(x);
  out[static_cast<size_t>(axis)] = end - start;
  const auto one = [&](int64_t v) { return constant(Tensor::from(std::vector<int64_t>{v}, {1})); };
  return op("Slice", {x, one(start), one(end), one(axis)}, std::move(out));
}

ValueId OnnxBuilder::reduce_mean(ValueId x, std::vector<int64_t> axes, bool keepdims) {
  Shape out;
  const Shape& in = shape(x);
  for (size_t d = 0; d < in.size(); ++d) {
    const bool reduced = std::find(axes.begin(), axes.end(), static_cast<int64_t>(d)) != axes.end();
    if (!reduced || keepdims) {
      out.push_back(reduced ? 1 : in[d]);
    }
  }
  return op("ReduceMean",
            {x},
            std::move(out),
            {{"axes", std::move(axes)}, {"keepdims", int64_t{keepdims}}});
}

ValueId OnnxBuilder::softmax(ValueId x) {
  return unary("Softmax", x, {{"axis", int64_t{-1}}});
}

ValueId OnnxBuilder::dropout(ValueId x, double ratio) {
  if (ratio <= 0) {
    return x;
  }
  Tensor training(DType::kBool, {});
  *training.data<bool>() = true;
  return op("Dropout", {x, scalar(ratio), constant(training)}, shape(x));
}

ValueId OnnxBuilder::matmul(ValueId a, ValueId b) {
  const Shape& sa = shape(a);
  const Shape& sb = shape(b);
  Shape out = broadcast_shapes(Shape(sa.begin(), sa.end() - 2), Shape(sb.begin(), sb.end() - 2));
  TRAINRT_CHECK(sa.back() == sb[sb.size() - 2]);
  out.push_back(sa[sa.size() - 2]);
  out.push_back(sb.back());
  return op("MatMul", {a, b}, std::move(out));
}

ValueId OnnxBuilder::gather(ValueId table, ValueId indices) {
  Shape out = shape(indices);
  out.insert(out.end(), shape(table).begin() + 1, shape(table).end());
  return op("Gather", {table, indices}, std::move(out), {{"axis", int64_t{0}}});
}

ValueId OnnxBuilder::linear(
    ValueId x, int64_t out, const std::string& name, double stddev, bool bias) {
  const ValueId y = matmul(x, normal(name + ".weight", {shape(x).back(), out}, stddev));
  return bias ? add(y, filled(name + ".bias", {out}, 0)) : y;
}

ValueId OnnxBuilder::dense(ValueId x, int64_t out, const std::string& name) {
  const int64_t in = shape(x).back();
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  const ValueId weight_id = uniform(name + ".weight", {out, in}, bound);
  const ValueId bias = uniform(name + ".bias", {out}, bound);
  return op("Gemm", {x, weight_id, bias}, {shape(x)[0], out}, {{"transB", int64_t{1}}}, name);
}

ValueId OnnxBuilder::embedding(ValueId ids,
                               int64_t vocab,
                               int64_t width,
                               const std::string& name,
                               double stddev,
                               ValueId* table) {
  const ValueId weight_id = normal(name + ".weight", {vocab, width}, stddev);
  if (table != nullptr) {
    *table = weight_id;
  }
  return gather(weight_id, ids);
}

ValueId OnnxBuilder::layer_norm(ValueId x, const std::string& name, double eps) {
  const int64_t width = shape(x).back();
  return op("LayerNormalization",
            {x, filled(name + ".weight", {width}, 1), filled(name + ".bias", {width}, 0)},
            shape(x),
            {{"axis", int64_t{-1}}, {"epsilon", eps}},
            name);
}

ValueId OnnxBuilder::rms_norm(ValueId x, const std::string& name, double eps) {
  const int64_t last = static_cast<int64_t>(shape(x).size()) - 1;
  const ValueId mean = reduce_mean(binary("Pow", x, scalar(2)), {last}, true);
  const ValueId root = unary("Sqrt", add(mean, scalar(eps)));
  return mul(binary("Div", x, root), filled(name + ".weight", {shape(x).back()}, 1));
}

ValueId OnnxBuilder::gelu(ValueId x) {
  const ValueId erf = unary("Erf", binary("Div", x, scalar(std::sqrt(2.0))));
  return mul(mul(x, add(erf, scalar(1))), scalar(0.5));
}

ValueId OnnxBuilder::gelu_tanh(ValueId x) {
  const ValueId cube = binary("Pow", x, scalar(3));
  const ValueId inner = mul(add(x, mul(cube, scalar(0.044715))), scalar(std::sqrt(2 / M_PI)));
  return mul(mul(x, scalar(0.5)), add(unary("Tanh", inner), scalar(1)));
}

ValueId OnnxBuilder::silu(ValueId x) {
  return mul(x, unary("Sigmoid", x));
}

ValueId OnnxBuilder::split_heads(ValueId x, int64_t heads) {
  const Shape s = shape(x);
  return transpose(reshape(x, {s[0], s[1], heads, s[2] / heads}), {0, 2, 1, 3});
}

ValueId OnnxBuilder::merge_heads(ValueId x) {
  const Shape s = shape(x);
  return reshape(transpose(x, {0, 2, 1, 3}), {s[0], s[2], s[1] * s[3]});
}

ValueId OnnxBuilder::attention(
    ValueId q, ValueId k, ValueId v, double scale, ValueId mask, double dropout_ratio) {
  ValueId scores = matmul(q, transpose(k, {0, 1, 3, 2}));
  if (scale != 1) {
    scores = mul(scores, scalar(scale));
  }
  if (mask != kNoValue) {
    scores = add(scores, mask);
  }
  return matmul(dropout(softmax(scores), dropout_ratio), v);
}

ValueId OnnxBuilder::positions(ValueId ids) {
  const ValueId dims = node("Shape", {ids}, {{DType::kInt64, {2}}}).at(0);
  const ValueId axis = constant(Tensor::scalar(int64_t{1}));
  const ValueId length = node("Gather", {dims, axis}, {{DType::kInt64, {}}}).at(0);
  const ValueId zero = constant(Tensor::scalar(int64_t{0}));
  const ValueId one = constant(Tensor::scalar(int64_t{1}));
  return node("Range", {zero, length, one}, {{DType::kInt64, {shape(ids).at(1)}}}).at(0);
}

ValueId OnnxBuilder::causal_mask(ValueId ids) {
  // Computed in the graph (and folded at import), so the file holds no seq x seq table.
  const int64_t seq = shape(ids).at(1);
  ValueId dims = kNoValue;
  if (symbolic_seq_) {
    const ValueId sizes = node("Shape", {ids}, {{DType::kInt64, {2}}}).at(0);
    const ValueId axes = constant(Tensor::from(std::vector<int64_t>{1, 1}, {2}));
    dims = node("Gather", {sizes, axes}, {{DType::kInt64, {2}}}).at(0);
  } else {
    dims = constant(Tensor::from(std::vector<int64_t>{seq, seq}, {2}));
  }
  const float minus_inf = -std::numeric_limits<float>::infinity();
  const ValueId full = node("ConstantOfShape",
                            {dims},
                            {{DType::kFloat32, {seq, seq}}},
                            {{"value", Tensor::from(std::vector<float>{minus_inf}, {1})}})
                           .at(0);
  const ValueId diagonal = constant(Tensor::scalar(int64_t{1}));
  return op("Trilu", {full, diagonal}, {seq, seq}, {{"upper", int64_t{1}}});
}

ValueId OnnxBuilder::conv(ValueId x, int64_t out, const std::string& name, ConvOptions options) {
  const Shape s = shape(x);
  const int64_t pad = options.pad < 0 ? options.kernel / 2 : options.pad;
  const auto extent = [&](int64_t size) {
    return (size + 2 * pad - options.kernel) / options.stride + 1;
  };
  const int64_t in = s[1] / options.groups;
  const double fan_in = static_cast<double>(in * options.kernel * options.kernel);
  // Kaiming normal for ReLU networks (He et al., arXiv 1502.01852, eq. 10).
  std::vector<ValueId> inputs = {
      x,
      normal(name + ".weight", {out, in, options.kernel, options.kernel}, std::sqrt(2 / fan_in))};
  if (options.bias) {
    inputs.push_back(filled(name + ".bias", {out}, 0));
  }
  return op("Conv",
            inputs,
            {s[0], out, extent(s[2]), extent(s[3])},
            {{"kernel_shape", std::vector<int64_t>{options.kernel, options.kernel}},
             {"strides", std::vector<int64_t>{options.stride, options.stride}},
             {"pads", std::vector<int64_t>{pad, pad, pad, pad}},
             {"dilations", std::vector<int64_t>{1, 1}},
             {"group", options.groups}},
            name);
}

ValueId OnnxBuilder::conv_transpose(
    ValueId x, int64_t out, const std::string& name, int64_t kernel, int64_t stride) {
  const Shape s = shape(x);
  const double fan_in =
      static_cast<double>(s[1] * kernel * kernel) / static_cast<double>(stride * stride);
  const auto extent = [&](int64_t size) { return (size - 1) * stride + kernel; };
  return op("ConvTranspose",
            {x,
             normal(name + ".weight", {s[1], out, kernel, kernel}, std::sqrt(1 / fan_in)),
             filled(name + ".bias", {out}, 0)},
            {s[0], out, extent(s[2]), extent(s[3])},
            {{"kernel_shape", std::vector<int64_t>{kernel, kernel}},
             {"strides", std::vector<int64_t>{stride, stride}},
             {"pads", std::vector<int64_t>{0, 0, 0, 0}}},
            name);
}

ValueId OnnxBuilder::batch_norm(ValueId x, const std::string& name) {
  const int64_t channels = shape(x)[1];
  const TensorType statistics = {DType::kFloat32, {channels}};
  return node("BatchNormalization",
              {x,
               filled(name + ".weight", {channels}, 1),
               filled(name + ".bias", {channels}, 0),
               state(name + ".running_mean", {channels}, 0),
               state(name + ".running_var", {channels}, 1)},
              {{DType::kFloat32, shape(x)}, statistics, statistics},
              {{"epsilon", 1e-5}, {"momentum", 0.9}, {"training_mode", int64_t{1}}},
              name)
      .at(0);
}

ValueId OnnxBuilder::group_norm(ValueId x, int64_t groups, const std::string& name) {
  // The form that exporters write: InstanceNormalization over reshaped groups.
  const Shape s = shape(x);
  const int64_t rest = dims_product(s, 1, static_cast<int>(s.size())) / groups;
  const ValueId grouped = reshape(x, {s[0], groups, rest});
  const auto per_group = [&](float value) {
    return constant(Tensor::from(std::vector<float>(static_cast<size_t>(groups), value), {groups}));
  };
  const ValueId normalised = op("InstanceNormalization",
                                {grouped, per_group(1), per_group(0)},
                                shape(grouped),
                                {{"epsilon", 1e-5}},
                                name);
  const ValueId back = reshape(normalised, s);
  return add(mul(back, filled(name + ".weight", {s[1], 1, 1}, 1)),
             filled(name + ".bias", {s[1], 1, 1}, 0));
}

ValueId OnnxBuilder::pool(
    const std::string& op_type, ValueId x, int64_t kernel, int64_t stride, int64_t pad) {
  const Shape s = shape(x);
  const auto extent = [&](int64_t size) { return (size + 2 * pad - kernel) / stride + 1; };
  return op(op_type,
            {x},
            {s[0], s[1], extent(s[2]), extent(s[3])},
            {{"kernel_shape", std::vector<int64_t>{kernel, kernel}},
             {"strides", std::vector<int64_t>{stride, stride}},
             {"pads", std::vector<int64_t>{pad, pad, pad, pad}}});
}

ValueId OnnxBuilder::global_average_pool(ValueId x) {
  const Shape s = shape(x);
  return flatten(op("GlobalAveragePool", {x}, {s[0], s[1], 1, 1}));
}

ValueId OnnxBuilder::flatten(ValueId x) {
  const Shape s = shape(x);
  return op("Flatten",
            {x},
            {s[0], dims_product(s, 1, static_cast<int>(s.size()))},
            {{"axis", int64_t{1}}});
}

}  // namespace trainrt
