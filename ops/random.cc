// RandomUniform, RandomNormal and Bernoulli, drawn by ops/random_draw.h.
//
//   RandomUniform()  -> [shape]   low, high, shape, dtype
//   RandomNormal()   -> [shape]   mean, scale, shape, dtype
//   Bernoulli(p)     -> like p    dtype; true with probability p
//
// The ...Like forms of ONNX become the plain ones.
#include "graph/random.h"

#include "graph/upgrade.h"
#include "ops/onnx_dtype.h"
#include "ops/random_draw.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

DType result_type(const OpContext& op) {
  return dtype_attribute(op.attributes().get_string("dtype"));
}

// The upper 24 bits suffice: the draw is one word whatever the dtype, so float64 checks see the
// numbers that float32 runs see.
template <typename T>
void uniform_kernel(KernelContext& op) {
  const double low = op.attributes().get_float("low", 0);
  const double width = op.attributes().get_float("high", 1) - low;
  T* y = op.output<T>(0);
  draw_words(op, op.output_shape(0), [&](int64_t begin, const uint32_t* words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      y[begin + i] = store<T>(low + width * static_cast<double>(uniform_float(words[i])));
    }
  });
}

// Box-Muller wants two words: the second is the first, mixed.
template <typename T>
void normal_kernel(KernelContext& op) {
  const double mean = op.attributes().get_float("mean", 0);
  const double scale = op.attributes().get_float("scale", 1);
  T* y = op.output<T>(0);
  draw_words(op, op.output_shape(0), [&](int64_t begin, const uint32_t* words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t second = static_cast<uint32_t>(mix_keys(words[i], 1) >> 32);
      y[begin + i] = store<T>(mean + scale * normal_double(words[i], second));
    }
  });
}

template <typename T>
void bernoulli_kernel(KernelContext& op) {
  const T* p = op.input<T>(0);
  dispatch_all(op.output_dtype(0), [&](auto tag) {
    using Out = decltype(tag);
    Out* y = op.output<Out>(0);
    draw_words(op, op.output_shape(0), [&](int64_t begin, const uint32_t* words, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        const bool hit = uniform_float(words[i]) < load<float>(p[begin + i]);
        y[begin + i] = static_cast<Out>(hit ? 1.0f : 0.0f);
      }
    });
  });
}

// The element type that the ONNX node asks for, or a fallback.
std::string wanted_dtype(UpgradeContext& u, DType fallback) {
  const int64_t number = u.attributes().get_int("dtype", 0);
  return dtype_name(number == 0 ? fallback : dtype_from_onnx(number));
}

void upgrade_random(UpgradeContext& u) {
  const bool like = u.op_type().size() > 4 && u.op_type().substr(u.op_type().size() - 4) == "Like";
  const std::string type = like ? u.op_type().substr(0, u.op_type().size() - 4) : u.op_type();
  Attributes attributes;
  const DType given =
      like && is_floating(u.dtype(u.input(0))) ? u.dtype(u.input(0)) : DType::kFloat32;
  attributes.set("dtype", wanted_dtype(u, given));
  attributes.set("shape", like ? u.shape(u.input(0)) : u.attributes().get_ints("shape"));
  for (const char* name : {"low", "high", "mean", "scale"}) {
    if (u.attributes().has(name)) {
      attributes.set(name, u.attributes().get_float(name));
    }
  }
  set_random_stream(attributes, u.node_name(), u.attributes().get_float("seed", 0));
  u.set_outputs(u.emit(type, {}, attributes));
}

void upgrade_bernoulli(UpgradeContext& u) {
  Attributes attributes = {{"dtype", wanted_dtype(u, u.dtype(u.input(0)))}};
  set_random_stream(attributes, u.node_name(), u.attributes().get_float("seed", 0));
  u.set_outputs(u.emit("Bernoulli", {u.input(0)}, attributes));
}

OpDef random_op(const char* name, Kernel kernel) {
  OpDef op;
  op.name = name;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 16); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context);
  };
  op.localize = localize_random;
  op.reference_kernel = std::move(kernel);
  op.not_differentiable = true;
  op.random = true;
  return op;
}

Attributes example_attributes() {
  return {{"shape", Shape{4, 6, 10}},
          {"dtype", std::string("float32")},
          {"rng_stream", int64_t{99}},
          {"batch_axis", int64_t{0}},
          {"rows_per_sample", int64_t{1}}};
}

OpDef filled_op(const char* name, Kernel kernel) {
  OpDef op = random_op(name, std::move(kernel));
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {{result_type(context), context.attributes().get_ints("shape")}};
  };
  op.upgrade = upgrade_random;
  op.examples = {{.name = "shape", .attributes = example_attributes(), .inputs = {}, .values = {}}};
  return op;
}

OpDef bernoulli_op() {
  OpDef op = random_op("Bernoulli", [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { bernoulli_kernel<decltype(tag)>(context); });
  });
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    require_real(context);
    return {{result_type(context), context.input_shape(0)}};
  };
  op.upgrade = upgrade_bernoulli;
  Attributes attributes = example_attributes();
  attributes.erase("shape");
  op.examples = {{.name = "probabilities",
                  .attributes = attributes,
                  .inputs = {{DType::kFloat32, {4, 6, 10}}},
                  .values = {},
                  .low = 0,
                  .high = 1}};
  return op;
}

template <typename Fn>
Kernel by_output(Fn fn) {
  return [fn](KernelContext& op) {
    dispatch_real(op.output_dtype(0), [&](auto tag) { fn(tag, op); });
  };
}

const RegisterOp kUniform{filled_op("RandomUniform", by_output([](auto tag, KernelContext& op) {
                                      uniform_kernel<decltype(tag)>(op);
                                    }))};
const RegisterOp kNormal{filled_op("RandomNormal", by_output([](auto tag, KernelContext& op) {
                                     normal_kernel<decltype(tag)>(op);
                                   }))};
const RegisterOp kBernoulli{bernoulli_op()};
const RegisterUpgrade kUniformLike{"RandomUniformLike", upgrade_random};
const RegisterUpgrade kNormalLike{"RandomNormalLike", upgrade_random};

}  // namespace

}  // namespace trainrt
