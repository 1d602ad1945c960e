// The vocabulary of the model builders: layers of plain ONNX operators (opset 17) with types worked
// out here, so that models/ needs no operator of ours. Names follow PyTorch's module paths.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"
#include "models/model.h"

namespace trainrt {

class OnnxBuilder {
 public:
  // `symbolic_seq`: axis 1 of the inputs may have any size; nothing in the graph says which.
  explicit OnnxBuilder(uint64_t seed, bool symbolic_seq = false)
      : seed_(seed), symbolic_seq_(symbolic_seq) {}

  Graph& graph() { return graph_; }
  const Shape& shape(ValueId id) const { return graph_.value(id).type.shape; }
  DType dtype(ValueId id) const { return graph_.value(id).type.dtype; }

  ValueId input(const std::string& name, DType dtype, Shape shape) {
    return graph_.add_input(name, {dtype, std::move(shape)}, /*batch_axis=*/0);
  }
  void output(ValueId id, const std::string& name);

  // Weights, drawn when they are read. normal: mean 0 and the given standard deviation; uniform: in
  // [-bound, bound]; filled: one value.
  ValueId normal(const std::string& name, Shape shape, double stddev);
  ValueId uniform(const std::string& name, Shape shape, double bound);
  ValueId filled(const std::string& name, Shape shape, double value);
  ValueId state(const std::string& name, Shape shape, double value);  // BatchNorm's statistics
  ValueId constant(Tensor data);
  ValueId scalar(double value) { return constant(Tensor::scalar(static_cast<float>(value))); }

  // One node; the type of every output is given.
  std::vector<ValueId> node(const std::string& op_type,
                            const std::vector<ValueId>& inputs,
                            const TensorTypes& types,
                            Attributes attributes = {},
                            const std::string& name = "");
  ValueId op(const std::string& op_type,
             const std::vector<ValueId>& inputs,
             Shape shape,
             Attributes attributes = {},
             const std::string& name = "");

  ValueId unary(const std::string& op_type, ValueId x, Attributes attributes = {});
  ValueId binary(const std::string& op_type, ValueId a, ValueId b);
  ValueId relu(ValueId x) { return unary("Relu", x); }
  ValueId add(ValueId a, ValueId b) { return binary("Add", a, b); }
  ValueId mul(ValueId a, ValueId b) { return binary("Mul", a, b); }
  // Dim 0 stays the batch, and dim 1 a symbolic sequence: written as 0.
  ValueId reshape(ValueId x, Shape shape);
  ValueId transpose(ValueId x, std::vector<int64_t> perm);
  ValueId concat(const std::vector<ValueId>& xs, int axis);
  ValueId slice(ValueId x, int axis, int64_t start, int64_t end);
  ValueId reduce_mean(ValueId x, std::vector<int64_t> axes, bool keepdims);
  ValueId softmax(ValueId x);                // over the last axis
  ValueId dropout(ValueId x, double ratio);  // nothing when ratio is 0
  ValueId matmul(ValueId a, ValueId b);
  ValueId gather(ValueId table, ValueId indices);

  // y = x W + b over the last axis; W is [in, out] as "<name>.weight", drawn with `stddev`.
  ValueId linear(ValueId x, int64_t out, const std::string& name, double stddev, bool bias = true);
  // PyTorch's default initialisation: uniform with bound 1 / sqrt(fan in); Gemm with transB.
  ValueId dense(ValueId x, int64_t out, const std::string& name);
  ValueId embedding(ValueId ids,
                    int64_t vocab,
                    int64_t width,
                    const std::string& name,
                    double stddev,
                    ValueId* table = nullptr);
  ValueId layer_norm(ValueId x, const std::string& name, double eps = 1e-5);
  ValueId rms_norm(ValueId x, const std::string& name, double eps);
  ValueId gelu(ValueId x);       // exact, by Erf
  ValueId gelu_tanh(ValueId x);  // GPT-2's approximation
  ValueId silu(ValueId x);
  // [batch, seq, heads * d] -> [batch, heads, seq, d] and back.
  ValueId split_heads(ValueId x, int64_t heads);
  ValueId merge_heads(ValueId x);
  // softmax(q k^T * scale + mask) v over [batch, heads, seq, d]; mask may be kNoValue.
  ValueId attention(ValueId q, ValueId k, ValueId v, double scale, ValueId mask, double dropout);
  ValueId positions(ValueId ids);    // of ids [batch, seq]: 0, 1 ... seq - 1
  ValueId causal_mask(ValueId ids);  // [seq, seq]: 0 on and below the diagonal, -inf above

  struct ConvOptions {
    int64_t kernel = 3;
    int64_t stride = 1;
    int64_t pad = -1;  // -1: kernel / 2
    int64_t groups = 1;
    bool bias = false;
  };
  ValueId conv(ValueId x, int64_t out, const std::string& name, ConvOptions options);
  ValueId conv_transpose(
      ValueId x, int64_t out, const std::string& name, int64_t kernel, int64_t stride);
  ValueId batch_norm(ValueId x, const std::string& name);
  ValueId group_norm(ValueId x, int64_t groups, const std::string& name);
  ValueId pool(const std::string& op_type, ValueId x, int64_t kernel, int64_t stride, int64_t pad);
  ValueId global_average_pool(ValueId x);  // -> [batch, channels]
  ValueId flatten(ValueId x);

 private:
  ValueId weight(const std::string& name, Shape shape, const std::string& kind, double parameter);

  Graph graph_;
  uint64_t seed_;
  bool symbolic_seq_ = false;
};

// Checks `value > 0` and `value % divisor == 0` with the names of both sizes.
void require_multiple(int64_t value, const char* name, int64_t divisor, const char* divisor_name);

// Checks that an image of this side has pixels left after all strides; `least` is the smallest.
void require_image(int64_t image, int64_t least, const std::string& model);

// 2^layers: the side of which `layers` halvings leave one pixel. Throws kInvalidArgument where no
// image can have it.
int64_t side_for_halvings(int64_t layers, const std::string& model);

}  // namespace trainrt
