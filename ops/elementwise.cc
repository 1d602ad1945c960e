// The type-erased part of element-wise kernels. The output is cut into blocks of kGrain elements;
// within a block, runs along the innermost merged dim go to the functor's loop directly when the
// tensors have its type, and through buffers of kChunk elements on the stack otherwise. Where the
// innermost dim is short the operands are gathered into such buffers first, so that a [N, 3]
// against [N, 1] does not call the loop once per three elements.
#include "ops/elementwise.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "graph/autodiff.h"
#include "graph/fused_elementwise.h"
#include "graph/passes/layout.h"
#include "ops/convert.h"

namespace trainrt::elementwise {

namespace {

constexpr int64_t kGrain = 1 << 15;
constexpr int64_t kChunk = 512;
constexpr int64_t kShortInner = 32;

struct alignas(64) Buffer {
  std::byte bytes[kChunk * 8];
};

struct Operand {
  const std::byte* data;
  DType dtype;
  int64_t bytes;
  bool dense;     // walks exactly like the output
  bool periodic;  // has strides in the innermost dim alone
};

// One launch; lives on the stack of the caller of parallel_for.
struct Launch {
  BroadcastLoops loops;
  std::array<Operand, kMaxOperands> inputs;
  int num_inputs;
  InnerLoop loop;
  const void* functor;
  bool convert;  // inputs to `compute`; else read as they are
  DType compute;
  DType result;
  std::byte* out;
  DType out_dtype;
  int64_t out_bytes;

  // Result element `index` onwards from n elements at in[i] of input i, some of them repeated.
  void apply(const std::byte* const* in, unsigned repeated, int64_t index, int64_t n) const {
    Buffer in_buffers[kMaxOperands];
    Buffer out_buffer;
    for (int64_t done = 0; done < n;) {
      const bool direct_out = out_dtype == result;
      bool direct = direct_out;
      for (int i = 0; i < num_inputs; ++i) {
        direct = direct && (!convert || inputs[static_cast<size_t>(i)].dtype == compute);
      }
      const int64_t count = direct ? n : std::min(kChunk, n - done);
      const void* pointers[kMaxOperands];
      for (int i = 0; i < num_inputs; ++i) {
        const Operand& input = inputs[static_cast<size_t>(i)];
        const bool once = (repeated >> i) & 1;
        const std::byte* from = in[i] + (once ? 0 : done * input.bytes);
        pointers[i] = from;
        if (convert && input.dtype != compute) {
          convert_elements(input.dtype, from, compute, in_buffers[i].bytes, once ? 1 : count);
          pointers[i] = in_buffers[i].bytes;
        }
      }
      std::byte* to = out + (index + done) * out_bytes;
      loop(functor, pointers, repeated, direct_out ? to : out_buffer.bytes, count);
      if (!direct_out) {
        convert_elements(result, out_buffer.bytes, out_dtype, to, count);
      }
      done += count;
    }
  }

  void run_rows(int64_t begin, int64_t end) const {
    const int64_t inner = loops.inner();
    RowCursor row(loops, begin / inner);
    int64_t column = begin % inner;
    unsigned repeated = 0;
    for (int i = 0; i < num_inputs; ++i) {
      repeated |= loops.inner_stride(i) == 0 ? 1u << i : 0u;
    }
    for (int64_t index = begin; index < end;) {
      const int64_t n = std::min(inner - column, end - index);
      const std::byte* in[kMaxOperands];
      for (int i = 0; i < num_inputs; ++i) {
        const Operand& input = inputs[static_cast<size_t>(i)];
        in[i] = input.data + (row.offset(i) + column * loops.inner_stride(i)) * input.bytes;
      }
      apply(in, repeated, index, n);
      index += n;
      column = 0;
      row.next();
    }
  }

  // Chunks are whole multiples of the innermost dim, so that an operand without outer strides (a
  // bias) repeats itself from chunk to chunk and is gathered once.
  void run_gathered(int64_t begin, int64_t end) const {
    const int64_t inner = loops.inner();
    const int64_t chunk = kChunk / inner * inner;
    const int64_t column = begin % inner;  // every chunk starts at this column
    RowCursor row(loops, begin / inner);
    Buffer gathered[kMaxOperands];
    for (int64_t index = begin; index < end; index += chunk) {
      const int64_t n = std::min(chunk, end - index);
      const std::byte* in[kMaxOperands];
      RowCursor next = row;
      for (int i = 0; i < num_inputs; ++i) {
        const Operand& input = inputs[static_cast<size_t>(i)];
        in[i] = input.dense ? input.data + index * input.bytes : gathered[i].bytes;
        if (!input.dense && (index == begin || !input.periodic)) {
          next = gather(i, row, column, n, gathered[i].bytes);
        }
      }
      apply(in, 0, index, n);
      row = next;
    }
  }

  // n elements of operand i from (row, column) on; returns the row after them.
  RowCursor gather(int i, RowCursor row, int64_t column, int64_t n, std::byte* to) const {
    switch (inputs[static_cast<size_t>(i)].bytes) {
      case 1:
        return gather_words<uint8_t>(i, row, column, n, to);
      case 2:
        return gather_words<uint16_t>(i, row, column, n, to);
      case 4:
        return gather_words<uint32_t>(i, row, column, n, to);
      default:
        return gather_words<uint64_t>(i, row, column, n, to);
    }
  }

  template <typename Word>
  RowCursor gather_words(int i, RowCursor row, int64_t column, int64_t n, std::byte* to) const {
    const Word* data = reinterpret_cast<const Word*>(inputs[static_cast<size_t>(i)].data);
    Word* words = reinterpret_cast<Word*>(to);
    const int64_t inner = loops.inner();
    const int64_t stride = loops.inner_stride(i);
    for (int64_t done = 0; done < n;) {
      const int64_t run = std::min(inner - column, n - done);
      const Word* from = data + row.offset(i) + column * stride;
      for (int64_t j = 0; j < run; ++j) {
        words[done + j] = from[j * stride];
      }
      done += run;
      column += run;
      if (column == inner) {
        column = 0;
        row.next();
      }
    }
    return row;
  }
};

Launch make_launch(KernelContext& context, InnerLoop loop, const void* functor) {
  Launch launch;
  launch.num_inputs = context.num_inputs();
  launch.loop = loop;
  launch.functor = functor;
  std::array<const Shape*, kMaxOperands> shapes{};
  TRAINRT_CHECK(launch.num_inputs <= kMaxOperands, context.node().name);
  for (int i = 0; i < launch.num_inputs; ++i) {
    TRAINRT_CHECK(context.has_input(i), context.node().name, ": input ", i, " is absent");
    shapes[static_cast<size_t>(i)] = &context.input_shape(i);
    launch.inputs[static_cast<size_t>(i)] = {static_cast<const std::byte*>(context.raw_input(i)),
                                             context.input_dtype(i),
                                             dtype_bytes(context.input_dtype(i)),
                                             context.input_shape(i) == context.output_shape(0),
                                             true};
  }
  launch.loops = broadcast_loops(context.output_shape(0),
                                 std::span(shapes).first(static_cast<size_t>(launch.num_inputs)));
  for (int i = 0; i < launch.num_inputs; ++i) {
    for (int d = 0; d + 1 < launch.loops.ndim; ++d) {
      const int64_t stride = launch.loops.strides[static_cast<size_t>(i)][static_cast<size_t>(d)];
      launch.inputs[static_cast<size_t>(i)].periodic &= stride == 0;
    }
  }
  launch.out = static_cast<std::byte*>(context.raw_output(0));
  launch.out_dtype = context.output_dtype(0);
  launch.out_bytes = dtype_bytes(launch.out_dtype);
  return launch;
}

void start(KernelContext& context, const Launch& launch) {
  const int64_t n = num_elements(context.output_shape(0));
  const bool gathered = launch.loops.ndim > 1 && launch.loops.inner() < kShortInner;
  if (gathered) {
    context.parallel_for(
        n, kGrain, [&launch](int64_t begin, int64_t end) { launch.run_gathered(begin, end); });
  } else {
    context.parallel_for(
        n, kGrain, [&launch](int64_t begin, int64_t end) { launch.run_rows(begin, end); });
  }
}

void require_dtype(const OpContext& op, int input, Numbers numbers) {
  const DType dtype = op.input_dtype(input);
  TRAINRT_REQUIRE(is_floating(dtype) || (numbers == Numbers::kNumeric && is_integer(dtype)),
                  kInvalidModel,
                  "input ",
                  input,
                  " of ",
                  op.node().op_type,
                  " is ",
                  dtype_name(dtype),
                  ", wanted ",
                  numbers == Numbers::kNumeric ? "a number" : "a floating-point type");
}

OpDef form(std::string name) {
  OpDef op;
  op.name = std::move(name);
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context);
  };
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  // An ONNX node has the inputs and attributes that ours has.
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  RegisterImageRule(op.name, {ImageForm::kElementwise});
  RegisterElementwise(op.name);
  return op;
}

}  // namespace

void run(KernelContext& context, const Loop& loop, const void* functor) {
  Launch launch = make_launch(context, loop.run, functor);
  launch.convert = true;
  launch.compute = loop.compute;
  launch.result = loop.result;
  start(context, launch);
}

void run_unconverted(KernelContext& context, InnerLoop loop, const void* functor) {
  Launch launch = make_launch(context, loop, functor);
  launch.convert = false;
  launch.compute = launch.out_dtype;
  launch.result = launch.out_dtype;
  start(context, launch);
}

void fail_dtype(const Node& node, DType dtype) {
  TRAINRT_FAIL(kUnsupported,
               "node '",
               node.name,
               "' (",
               node.op_type,
               "): no kernel for inputs of ",
               dtype_name(dtype));
}

OpDef unary_form(std::string name, Numbers numbers, bool predicate) {
  OpDef op = form(std::move(name));
  op.infer_types = [numbers, predicate](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.num_inputs() == 1 && context.has_input(0),
                    kInvalidModel,
                    context.node().op_type,
                    " takes 1 input, got ",
                    context.num_inputs());
    require_dtype(context, 0, numbers);
    return {{predicate ? DType::kBool : context.input_dtype(0), context.input_shape(0)}};
  };
  if (!predicate) {
    op.inplace = {{0, 0}};
  }
  return op;
}

OpDef broadcasting_form(std::string name, int num_inputs, Numbers numbers, bool predicate) {
  OpDef op = form(std::move(name));
  op.infer_types = [num_inputs, numbers, predicate](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.num_inputs() == num_inputs,
                    kInvalidModel,
                    context.node().op_type,
                    " takes ",
                    num_inputs,
                    " inputs, got ",
                    context.num_inputs());
    const DType dtype = context.input_dtype(0);
    Shape shape;
    for (int i = 0; i < num_inputs; ++i) {
      TRAINRT_REQUIRE(context.has_input(i),
                      kInvalidModel,
                      "input ",
                      i,
                      " of ",
                      context.node().op_type,
                      " is missing");
      TRAINRT_REQUIRE(context.input_dtype(i) == dtype,
                      kInvalidModel,
                      "inputs of ",
                      context.node().op_type,
                      " must have one type, got ",
                      dtype_name(dtype),
                      " and ",
                      dtype_name(context.input_dtype(i)));
      shape = broadcast_shapes(shape, context.input_shape(i));
    }
    require_dtype(context, 0, numbers);
    return {{predicate ? DType::kBool : dtype, shape}};
  };
  for (int i = 0; i < num_inputs && !predicate; ++i) {
    op.inplace.push_back({0, i});
  }
  return op;
}

}  // namespace trainrt::elementwise

namespace trainrt {

std::function<void(GradientBuilder&)> gradient_from_input(std::string grad_op) {
  return [grad_op = std::move(grad_op)](GradientBuilder& g) {
    g.set_input_grad(0, g.op(grad_op, {g.input(0), g.output_grad(0)}, g.attributes()));
  };
}

std::function<void(GradientBuilder&)> gradient_from_output(std::string grad_op) {
  return [grad_op = std::move(grad_op)](GradientBuilder& g) {
    g.set_input_grad(0, g.op(grad_op, {g.output(0), g.output_grad(0)}, g.attributes()));
  };
}

OpExample unary_example(double low, double high, Attributes attributes) {
  OpExample example;
  example.name = "matrix";
  example.attributes = std::move(attributes);
  example.inputs = {{DType::kFloat32, {6, 35}}};
  example.low = low;
  example.high = high;
  return example;
}

OpExample grad_example(double low, double high, Attributes attributes) {
  OpExample example = unary_example(low, high, std::move(attributes));
  example.inputs.push_back(example.inputs[0]);
  return example;
}

std::vector<OpExample> binary_examples(double low, double high, Attributes attributes) {
  const std::vector<std::pair<std::string, std::pair<Shape, Shape>>> shapes = {
      {"equal shapes", {{6, 35}, {6, 35}}},
      {"scalar", {{6, 5}, {}}},
      {"bias over the last dim", {{2, 3, 40}, {40}}},
      {"channel scale", {{2, 6, 40}, {6, 1}}},
      {"both broadcast", {{4, 1, 3}, {6, 1}}},
  };
  std::vector<OpExample> examples;
  for (const auto& [name, pair] : shapes) {
    OpExample example;
    example.name = name;
    example.attributes = attributes;
    example.inputs = {{DType::kFloat32, pair.first}, {DType::kFloat32, pair.second}};
    example.low = low;
    example.high = high;
    examples.push_back(std::move(example));
  }
  return examples;
}

}  // namespace trainrt
