#include "ops/widened.h"

#include <vector>

#include "ops/convert.h"

namespace trainrt {

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kGrain = 1 << 15;

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

TensorType widened(TensorType type) {
  if (is_16_bit(type.dtype)) {
    type.dtype = DType::kFloat32;
  }
  return type;
}

int64_t copy_bytes(const TensorType& type) {
  return is_16_bit(type.dtype) ? aligned(widened(type).bytes()) : 0;
}

// Of an operator before it runs (OpContext) or while it does (KernelContext).
template <typename Context>
int64_t copies_bytes(const Context& op) {
  int64_t bytes = 0;
  for (int i = 0; i < op.num_inputs(); ++i) {
    bytes += op.has_input(i) ? copy_bytes(op.input_type(i)) : 0;
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    bytes += op.has_output(i) ? copy_bytes(op.output_type(i)) : 0;
  }
  return bytes;
}

bool has_16_bit(const OpContext& op) {
  return copies_bytes(op) > 0;
}

OpContext widened_context(const OpContext& op) {
  TensorTypes inputs, outputs;
  std::vector<bool> present;
  for (int i = 0; i < op.num_inputs(); ++i) {
    inputs.push_back(op.has_input(i) ? widened(op.input_type(i)) : TensorType{});
    present.push_back(op.has_input(i));
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    outputs.push_back(widened(op.output_type(i)));
  }
  return {op.node(), std::move(inputs), std::move(present), std::move(outputs)};
}

void convert(
    const KernelContext& context, DType from, const void* in, DType to, void* out, int64_t n) {
  context.parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    convert_elements(from,
                     static_cast<const std::byte*>(in) + begin * dtype_bytes(from),
                     to,
                     static_cast<std::byte*>(out) + begin * dtype_bytes(to),
                     end - begin);
  });
}

// Runs `kernel` on float32 copies, which take the first bytes of `room`; the rest is its workspace.
void run_widened(KernelContext& context, const Kernel& kernel, std::span<std::byte> room) {
  std::byte* free = room.data();
  std::byte* const end = free + room.size();
  const size_t num_inputs = static_cast<size_t>(context.num_inputs());
  const size_t num_outputs = static_cast<size_t>(context.num_outputs());
  TensorTypes types(num_inputs + num_outputs);
  std::vector<TensorRef> refs(num_inputs + num_outputs);
  const auto place = [&](size_t at, const TensorType& type, void* data) {
    types[at] = widened(type);
    if (is_16_bit(type.dtype)) {
      data = free;
      free += copy_bytes(type);
    }
    refs[at] = {data, &types[at]};
  };
  for (int i = 0; i < context.num_inputs(); ++i) {
    if (!context.has_input(i)) {
      continue;
    }
    const TensorType& type = context.input_type(i);
    TensorRef& ref = refs[static_cast<size_t>(i)];
    place(static_cast<size_t>(i), type, context.raw_input(i));
    if (is_16_bit(type.dtype)) {
      convert(context,
              type.dtype,
              context.raw_input(i),
              DType::kFloat32,
              ref.data,
              num_elements(type.shape));
    }
  }
  for (int i = 0; i < context.num_outputs(); ++i) {
    if (context.has_output(i)) {
      place(num_inputs + static_cast<size_t>(i), context.output_type(i), context.raw_output(i));
    }
  }
  KernelContext wide(context.node(),
                     std::span(refs).first(num_inputs),
                     std::span(refs).last(num_outputs),
                     {free, end},
                     context.device(),
                     context.step());
  kernel(wide);
  for (int i = 0; i < context.num_outputs(); ++i) {
    if (context.has_output(i) && is_16_bit(context.output_dtype(i))) {
      convert(context,
              DType::kFloat32,
              refs[num_inputs + static_cast<size_t>(i)].data,
              context.output_dtype(i),
              context.raw_output(i),
              num_elements(context.output_shape(i)));
    }
  }
}

}  // namespace

void widen_16_bit(OpDef& op, std::function<bool(const OpContext&)> is_native) {
  const auto widens = [is_native = std::move(is_native)](const OpContext& context,
                                                         const DeviceSpec& spec) {
    return has_16_bit(context) && (spec.reference_kernels || !is_native || !is_native(context));
  };
  op.workspace = [widens, inner = op.workspace](const OpContext& context, const DeviceSpec& spec) {
    if (spec.backend != Backend::kCpu || !widens(context, spec)) {
      return inner ? inner(context, spec) : 0;
    }
    return copies_bytes(context) + (inner ? inner(widened_context(context), spec) : 0);
  };
  // Reference kernels have no workspace: they are no fast ones, and take what they need.
  op.reference_kernel = [inner = op.reference_kernel](KernelContext& context) {
    std::vector<std::byte> room(static_cast<size_t>(copies_bytes(context)));
    room.empty() ? inner(context) : run_widened(context, inner, room);
  };
  const auto make = [factory = op.cpu_factory, kernel = op.cpu_kernel, plain = op.reference_kernel](
                        const OpContext& context, const DeviceSpec& spec) {
    return factory ? factory(context, spec) : kernel ? kernel : plain;
  };
  op.cpu_kernel = {};
  op.cpu_factory = [widens, make](const OpContext& context, const DeviceSpec& spec) -> Kernel {
    if (!widens(context, spec)) {
      return make(context, spec);
    }
    return [inner = make(widened_context(context), spec)](KernelContext& run) {
      run_widened(run, inner, run.workspace());
    };
  };
}

}  // namespace trainrt
