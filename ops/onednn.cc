// A process-wide cache keeps prepared primitives: `workspace` and `cpu_factory` are asked about the
// same node one after the other, programs for other micro-batch sizes share most of their nodes,
// and making a primitive compiles code.
#include "ops/onednn.h"

#include <omp.h>

#include <map>
#include <mutex>

namespace trainrt::onednn {

namespace {

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

dnnl::stream& stream() {
  thread_local dnnl::stream instance(engine());
  return instance;
}

std::string cache_key(const OpContext& op, const DeviceSpec& spec) {
  std::string key = op.node().op_type + "/" + std::to_string(spec.threads);
  for (const auto& [name, value] : op.attributes()) {
    key += "/" + name + "=" + attribute_string(value);
  }
  const auto add_type = [&key](bool present, const TensorType& type) {
    key += present ? std::string("/") + dtype_name(type.dtype) + shape_string(type.shape) : "/-";
  };
  for (int i = 0; i < op.num_inputs(); ++i) {
    add_type(op.has_input(i), op.input_type(i));
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    add_type(op.has_output(i), op.output_type(i));
  }
  return key;
}

// Processors without AVX-512 have no bfloat16 kernels; asked of oneDNN itself, which knows by
// version and instruction set.
bool has_bfloat16() {
  static const bool found = [] {
    const dnnl::memory::desc square({16, 16}, dnnl::memory::data_type::bf16, {16, 1});
    const dnnl::matmul::primitive_desc product(
        engine(), square, square, square, user_scratchpad(), /*allow_empty=*/true);
    return static_cast<bool>(product);
  }();
  return found;
}

[[noreturn]] void rethrow(const dnnl::error& error, const std::string& where) {
  TRAINRT_FAIL(kDevice,
               where,
               ": oneDNN reports '",
               error.what(),
               "' (status ",
               static_cast<int>(error.status),
               ")");
}

}  // namespace

const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

ThreadScope::ThreadScope(int threads)
    : before_(omp_get_max_threads()), changed_(threads != before_) {
  if (changed_) {
    omp_set_num_threads(threads);
  }
}

ThreadScope::~ThreadScope() {
  if (changed_) {
    omp_set_num_threads(before_);
  }
}

bool supports(DType dtype) {
  return dtype == DType::kFloat32 || (dtype == DType::kBFloat16 && has_bfloat16());
}

dnnl::memory::data_type data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return dnnl::memory::data_type::f32;
    case DType::kBFloat16:
      return dnnl::memory::data_type::bf16;
    default:
      TRAINRT_FAIL(
          kUnsupported, "oneDNN kernels want float32 or bfloat16, got ", dtype_name(dtype));
  }
}

dnnl::memory::desc row_major(DType dtype, const Shape& shape) {
  return strided(dtype, shape, row_major_strides(shape));
}

dnnl::memory::desc strided(DType dtype, const Shape& shape, const Shape& strides) {
  return {shape, data_type(dtype), strides};
}

dnnl::memory::desc any_layout(DType dtype, const Shape& shape) {
  return {shape, data_type(dtype), dnnl::memory::format_tag::any};
}

dnnl::primitive_attr user_scratchpad() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

Prepared::Prepared(const dnnl::primitive_desc_base& desc,
                   const dnnl::primitive& primitive,
                   std::vector<Argument> arguments)
    : primitive_(primitive) {
  for (Argument& argument : arguments) {
    Bound bound;
    bound.wanted = desc.query_md(dnnl::query::exec_arg_md, argument.id);
    bound.reordered = bound.wanted != argument.layout;
    if (bound.reordered) {
      bound.offset = workspace_bytes_;
      workspace_bytes_ += aligned(static_cast<int64_t>(bound.wanted.get_size()));
      const auto& from = argument.is_output ? bound.wanted : argument.layout;
      const auto& to = argument.is_output ? argument.layout : bound.wanted;
      const dnnl::reorder::primitive_desc reorder_desc(
          engine(), from, engine(), to, user_scratchpad());
      TRAINRT_CHECK(reorder_desc.scratchpad_desc().get_size() == 0,
                    "a oneDNN reorder wants a scratchpad");
      bound.reorder = dnnl::reorder(reorder_desc);
    }
    bound.argument = std::move(argument);
    bound_.push_back(std::move(bound));
  }
  scratchpad_ = desc.query_md(dnnl::query::scratchpad_md, 0);
  scratchpad_offset_ = workspace_bytes_;
  workspace_bytes_ += aligned(static_cast<int64_t>(scratchpad_.get_size()));
}

void Prepared::run(KernelContext& context) const {
  const ThreadScope scope(context.device().spec().threads);
  std::byte* workspace = context.workspace().data();
  TRAINRT_CHECK(static_cast<int64_t>(context.workspace().size()) >= workspace_bytes_,
                context.node().name,
                ": workspace of ",
                context.workspace().size(),
                " bytes, not ",
                workspace_bytes_);
  try {
    std::unordered_map<int, dnnl::memory> arguments;
    std::vector<std::pair<const Bound*, dnnl::memory>> outputs_to_copy;
    for (const Bound& bound : bound_) {
      const Argument& argument = bound.argument;
      void* data = argument.is_output ? context.raw_output(argument.index)
                                      : context.raw_input(argument.index);
      dnnl::memory memory(argument.layout, engine(), data);
      if (!bound.reordered) {
        arguments.emplace(argument.id, memory);
        continue;
      }
      dnnl::memory copy(bound.wanted, engine(), workspace + bound.offset);
      if (argument.is_output) {
        outputs_to_copy.emplace_back(&bound, memory);
      } else {
        bound.reorder.execute(stream(), memory, copy);
      }
      arguments.emplace(argument.id, copy);
    }
    arguments.emplace(DNNL_ARG_SCRATCHPAD,
                      dnnl::memory(scratchpad_, engine(), workspace + scratchpad_offset_));
    primitive_.execute(stream(), arguments);
    for (auto& [bound, memory] : outputs_to_copy) {
      bound->reorder.execute(stream(), arguments.at(bound->argument.id), memory);
    }
    stream().wait();
  } catch (const dnnl::error& error) {
    rethrow(error, concat("node '", context.node().name, "' (", context.node().op_type, ")"));
  }
}

std::shared_ptr<const Prepared> prepare(const OpContext& op,
                                        const DeviceSpec& spec,
                                        const PrepareFn& make) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Prepared>> cache;
  const std::string key = cache_key(op, spec);
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const Prepared>& entry = cache[key];
  if (!entry) {
    const ThreadScope scope(spec.threads);
    try {
      entry = std::make_shared<const Prepared>(make(op));
    } catch (const dnnl::error& error) {
      rethrow(error, concat("node '", op.node().name, "' (", op.node().op_type, ")"));
    }
  }
  return entry;
}

}  // namespace trainrt::onednn
