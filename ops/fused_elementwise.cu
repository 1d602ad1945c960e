// FusedElementwise by a kernel of its own for every expression: a text that calls the steps'
// functors one after the other, compiled by NVRTC when the node runs first. Shapes are parameters,
// so the layers of a network share a kernel.
//
// A thread takes a pack of consecutive elements. Inputs of the result's shape are read as a whole,
// those of one element once, others by the loops of ops/broadcast.h.
#include <algorithm>
#include <limits>
#include <map>
#include <sstream>

#include "graph/fused_elementwise.h"
#include "ops/device_headers.cuh"
#include "ops/elementwise.cuh"
#include "ops/fused_functor.cuh"
#include "ops/fused_params.h"
#include "ops/launch.cuh"
#include "ops/same.h"

namespace trainrt {

namespace {

static_assert(FusedParams::kTensors >= FusedExpression::kMaxInputs &&
              FusedParams::kTensors >= FusedExpression::kMaxOutputs &&
              FusedParams::kBroadcast == FusedExpression::kMaxBroadcast &&
              FusedParams::kDims == kMaxDims && FusedExpression::kMaxBroadcast <= kMaxOperands);

std::map<std::string, FusedFunctorOf>& functors() {
  static std::map<std::string, FusedFunctorOf> registered;
  return registered;
}

constexpr int kWhole = -1, kOnce = -2;  // otherwise: the number among the broadcast inputs
constexpr int64_t kPackBytes = 16;      // of the widest type: what a thread loads at once

// An expression on tensors of known types.
class FusedKernel {
 public:
  explicit FusedKernel(const OpContext& op) : expression_(FusedExpression::of(op.attributes())) {
    for (int i = 0; i < op.num_inputs(); ++i) {
      types_.push_back(op.input_type(i));
    }
    num_inputs_ = types_.size();
    const TensorTypes steps = fused_step_types(expression_, types_);
    types_.insert(types_.end(), steps.begin(), steps.end());
    for (const FusedStep& step : expression_.steps) {
      const auto at = functors().find(step.op_type);
      TRAINRT_REQUIRE(at != functors().end(),
                      kUnsupported,
                      "node '",
                      op.node().name,
                      "': operator '",
                      step.op_type,
                      "' has no functor for a fused CUDA kernel");
      functors_.push_back(at->second(step.attributes));
    }
    find_loops(op);
    int64_t widest = 1;
    for (const TensorType& type : types_) {
      widest = std::max(widest, dtype_bytes(type.dtype));
    }
    pack_ = static_cast<int>(kPackBytes / widest);
    if (num_broadcast_ > 0 && loops_.inner() % pack_ != 0) {
      pack_ = 1;
    }
  }

  void run(KernelContext& context) {
    FusedParams params = {};
    params.n = trainrt::num_elements(shape());
    for (size_t i = 0; i < num_inputs_; ++i) {
      params.in[i] = context.raw_input(static_cast<int>(i));
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) {
      params.out[i] = context.raw_output(static_cast<int>(i));
    }
    for (size_t d = 0; d < static_cast<size_t>(loops_.ndim); ++d) {
      params.dims[d] = loops_.dims[d];
      for (size_t i = 0; i < static_cast<size_t>(num_broadcast_); ++i) {
        params.strides[i][d] = loops_.strides[i][d];
      }
    }
    const int pack = is_aligned(params) ? pack_ : 1;
    cudaKernel_t& kernel = pack == 1 ? alone_ : packed_;
    if (kernel == nullptr) {
      kernel = cuda_context(context).compiled({text(pack), headers()});
    }
    launch_compiled(context, kernel, (params.n + pack - 1) / pack, params, host_form(params));
  }

 private:
  const Shape& shape() const { return types_.back().shape; }

  void find_loops(const OpContext& op) {
    std::vector<const Shape*> broadcast;
    for (size_t i = 0; i < num_inputs_; ++i) {
      const Shape& own = op.input_shape(static_cast<int>(i));
      modes_.push_back(own == shape()                    ? kWhole
                       : trainrt::num_elements(own) == 1 ? kOnce
                                                         : num_broadcast_);
      if (modes_.back() >= 0) {
        broadcast.push_back(&own);
        ++num_broadcast_;
      }
    }
    TRAINRT_REQUIRE(num_inputs_ <= FusedExpression::kMaxInputs &&
                        expression_.outputs.size() <= FusedExpression::kMaxOutputs &&
                        broadcast.size() <= FusedExpression::kMaxBroadcast,
                    kUnsupported,
                    "node '",
                    op.node().name,
                    "' (",
                    kFusedElementwise,
                    ") has too many inputs or outputs for a CUDA kernel");
    if (num_broadcast_ > 0) {
      loops_ = broadcast_loops(shape(), broadcast);
    }
  }

  // Whether a broadcast input lies in one piece along the innermost loop, and so does every pack of
  // it; otherwise it has one element there. Steps of outer loops are multiples of that piece.
  bool is_run(int mode) const { return mode >= 0 && loops_.inner_stride(mode) == 1; }

  bool is_aligned(const FusedParams& params) const {
    const auto fits = [this](const void* data, DType dtype) {
      return reinterpret_cast<uintptr_t>(data) % static_cast<size_t>(pack_ * dtype_bytes(dtype)) ==
             0;
    };
    for (size_t i = 0; i < num_inputs_; ++i) {
      if ((modes_[i] == kWhole || is_run(modes_[i])) && !fits(params.in[i], types_[i].dtype)) {
        return false;
      }
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) {
      if (!fits(params.out[i], result_type(i))) {
        return false;
      }
    }
    return true;
  }

  DType result_type(size_t output) const {
    return types_[num_inputs_ + static_cast<size_t>(expression_.outputs[output])].dtype;
  }

  // ---- the text --------------------------------------------------------------------------------

  static const char* type_name(DType dtype) {
    return dtype == DType::kFloat32   ? "float"
           : dtype == DType::kFloat64 ? "double"
           : dtype == DType::kFloat16 ? "Float16"
                                      : "BFloat16";
  }

  // Inputs are v0, v1, ...; results go on from there.
  std::string text(int pack) const {
    const char* index = trainrt::num_elements(shape()) <= std::numeric_limits<uint32_t>::max()
                            ? "uint32_t"
                            : "uint64_t";
    std::ostringstream out;
    out << "#include \"ops/device_std.cuh\"\n#include \"ops/functors.h\"\n"
           "#include \"ops/fused_kernel.cuh\"\n\nnamespace trainrt {\n\n"
           "extern \"C\" __global__ void __launch_bounds__("
        << kBlockThreads << ") " << kCompiledKernel << "(const FusedParams p) {\n"
        << "  constexpr int kPack = " << pack << ";\n"
        << "  const Place<kPack> place(p.n);\n  if (place.count <= 0) {\n    return;\n  }\n";
    for (size_t i = 0; i < num_inputs_; ++i) {
      out << "  Pack<" << type_name(types_[i].dtype) << ", kPack> x" << i << ";\n  ";
      if (modes_[i] == kWhole) {
        out << "load(p.in[" << i << "], place, x" << i << ");\n";
      } else if (modes_[i] == kOnce) {
        out << "load_once(p.in[" << i << "], x" << i << ");\n";
      } else {
        out << "load_broadcast<" << loops_.ndim << ", " << index << ", "
            << (is_run(modes_[i]) ? "true" : "false") << ">(p, " << modes_[i] << ", p.in[" << i
            << "], place, x" << i << ");\n";
      }
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) {
      out << "  Pack<" << type_name(result_type(i)) << ", kPack> y" << i << ";\n";
    }
    out << "#pragma unroll\n  for (int j = 0; j < kPack; ++j) {\n";
    for (size_t i = 0; i < num_inputs_; ++i) {
      out << "    const auto v" << i << " = widen(x" << i << ".values[j]);\n";
    }
    for (size_t i = 0; i < functors_.size(); ++i) {
      step_text(i, out);
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) {
      out << "    y" << i << ".values[j] = Narrow<" << type_name(result_type(i)) << ">::of(v"
          << num_inputs_ + static_cast<size_t>(expression_.outputs[i]) << ");\n";
    }
    out << "  }\n";
    for (size_t i = 0; i < expression_.outputs.size(); ++i) {
      out << "  store(y" << i << ", place, p.out[" << i << "]);\n";
    }
    out << "}\n\n}  // namespace trainrt\n";
    return out.str();
  }

  void step_text(size_t i, std::ostream& out) const {
    const size_t result = num_inputs_ + i;
    out << "    const auto v" << result << " = rounded<" << type_name(types_[result].dtype) << ">(";
    if (functors_[i].bytes.empty()) {
      out << functors_[i].type << "{}(";
    } else {
      out << "functor<" << functors_[i].type << ">(";
      for (size_t word = 0; word < functors_[i].bytes.size(); ++word) {
        out << (word == 0 ? "" : ", ") << functors_[i].bytes[word] << "ull";
      }
      out << ")(";
    }
    for (size_t k = 0; k < expression_.steps[i].operands.size(); ++k) {
      out << (k == 0 ? "v" : ", v") << expression_.steps[i].operands[k];
    }
    out << "));\n";
  }

  // ops/device_std.cuh, which the text includes first, stands for what functors' headers include.
  static const std::vector<DeviceHeader>& headers() {
    static const std::vector<DeviceHeader> all = [] {
      std::vector<DeviceHeader> list(device_headers().begin(), device_headers().end());
      for (const char* name : {"cmath",
                               "cstdint",
                               "cstring",
                               "limits",
                               "numbers",
                               "type_traits",
                               "graph/attribute.h"}) {
        list.push_back({name, ""});
      }
      return list;
    }();
    return all;
  }

  // ---- on the test double ----------------------------------------------------------------------

#ifdef __CUDACC__
  static int host_form(const FusedParams&) {
    return 0;
  }
#else
  // What the compiled kernel does, for thread `i`.
  std::function<void(int64_t)> host_form(const FusedParams& params) const {
    const int64_t pack = is_aligned(params) ? pack_ : 1;
    return [kernel = *this, params, pack](int64_t i) {
      std::vector<std::vector<double>> results;
      const int64_t end = std::min((i + 1) * pack, params.n);
      for (int64_t j = i * pack; j < end; ++j) {  // all is read before anything is written
        results.push_back(kernel.values_at(params, j));
      }
      for (int64_t j = i * pack; j < end; ++j) {
        kernel.store_at(params, j, results[static_cast<size_t>(j - i * pack)]);
      }
    };
  }

  std::vector<double> values_at(const FusedParams& params, int64_t i) const {
    std::vector<double> values;
    for (size_t input = 0; input < num_inputs_; ++input) {
      values.push_back(
          load_at(types_[input].dtype, params.in[input], offset(params, modes_[input], i)));
    }
    for (size_t step = 0; step < functors_.size(); ++step) {
      const FusedFunctor& functor = functors_[step];
      const std::vector<int>& operands = expression_.steps[step].operands;
      double wide[3];
      float narrow[3];
      for (size_t k = 0; k < operands.size(); ++k) {
        wide[k] = values[static_cast<size_t>(operands[k])];
        narrow[k] = static_cast<float>(wide[k]);
      }
      const bool in_double = types_[static_cast<size_t>(operands[0])].dtype == DType::kFloat64;
      const double result = in_double ? functor.run_double(functor.bytes.data(), wide)
                                      : functor.run_float(functor.bytes.data(), narrow);
      values.push_back(round_to(types_[num_inputs_ + step].dtype, result));
    }
    return values;
  }

  static int64_t offset(const FusedParams& params, int mode, int64_t i) {
    int64_t result = mode == kWhole ? i : 0;
    for (int d = FusedParams::kDims - 1; mode >= 0 && d >= 0; --d) {
      if (params.dims[d] > 0) {
        result += i % params.dims[d] * params.strides[mode][d];
        i /= params.dims[d];
      }
    }
    return result;
  }

  static double load_at(DType dtype, const void* data, int64_t i) {
    return dtype == DType::kFloat64
               ? elementwise::StoredFloat<double>::load(data, dtype, i)
               : static_cast<double>(elementwise::StoredFloat<float>::load(data, dtype, i));
  }

  static double round_to(DType dtype, double value) {
    alignas(8) std::byte stored[8];
    if (dtype == DType::kFloat64) {
      return value;
    }
    elementwise::StoredFloat<float>::store(stored, dtype, 0, static_cast<float>(value));
    return load_at(dtype, stored, 0);
  }

  void store_at(const FusedParams& params, int64_t i, const std::vector<double>& values) const {
    for (size_t output = 0; output < expression_.outputs.size(); ++output) {
      const double value = values[num_inputs_ + static_cast<size_t>(expression_.outputs[output])];
      void* to = params.out[output];
      if (to == nullptr) {
        continue;
      }
      if (result_type(output) == DType::kFloat64) {
        elementwise::StoredFloat<double>::store(to, DType::kFloat64, i, value);
      } else {
        elementwise::StoredFloat<float>::store(
            to, result_type(output), i, static_cast<float>(value));
      }
    }
  }
#endif

  FusedExpression expression_;
  size_t num_inputs_ = 0;
  TensorTypes types_;  // of the inputs, then of the steps' results
  std::vector<FusedFunctor> functors_;
  std::vector<int> modes_;  // of the inputs
  int num_broadcast_ = 0;
  BroadcastLoops loops_;
  int pack_ = 1;
  cudaKernel_t packed_ = nullptr, alone_ = nullptr;
};

const RegisterKernel kFused{
    kFusedElementwise, Backend::kCuda, [](const OpContext& op, const DeviceSpec&) -> Kernel {
      const auto kernel = std::make_shared<FusedKernel>(op);
      return [kernel](KernelContext& context) { kernel->run(context); };
    }};

const RegisterFusedFunctor kCast{"Cast", fused_functor<Same, 1>};

}  // namespace

void register_fused_functor(const std::string& op_type, FusedFunctorOf functor) {
  functors()[op_type] = functor;
}

}  // namespace trainrt
