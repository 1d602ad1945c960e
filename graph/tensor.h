// Tensor data on the host, and where a tensor's data can be fetched from.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "graph/shape.h"

namespace trainrt {

// A dense row-major host tensor. Copies share the bytes; write only to a tensor you just made.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);  // zero-filled
  // Bytes owned by someone else, kept alive through `owner`.
  Tensor(DType dtype, Shape shape, std::shared_ptr<void> owner, std::byte* data);

  template <typename T>
  static Tensor from(const std::vector<T>& values, Shape shape) {
    Tensor tensor(dtype_of<T>, std::move(shape));
    TRAINRT_CHECK(static_cast<int64_t>(values.size()) == tensor.num_elements());
    std::copy(values.begin(), values.end(), tensor.data<T>());
    return tensor;
  }
  template <typename T>
  static Tensor scalar(T value) {
    return from(std::vector<T>{value}, {});
  }

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t num_elements() const { return trainrt::num_elements(shape_); }
  int64_t bytes() const { return num_elements() * dtype_bytes(dtype_); }

  std::byte* raw() { return data_; }
  const std::byte* raw() const { return data_; }
  template <typename T>
  T* data() {
    TRAINRT_CHECK(dtype_of<T> == dtype_, "tensor holds ", dtype_name(dtype_));
    return reinterpret_cast<T*>(data_);
  }
  template <typename T>
  const T* data() const {
    return const_cast<Tensor*>(this)->data<T>();
  }

  Tensor clone() const;
  Tensor reshaped(Shape shape) const;  // shares the bytes
  Tensor cast(DType dtype) const;      // a copy in another dtype, C++ conversion rules

  // The elements as int64 or double, whatever the dtype: for shape-like and attribute-like tensors.
  std::vector<int64_t> to_int64() const;
  std::vector<double> to_double() const;

 private:
  DType dtype_ = DType::kFloat32;
  Shape shape_;
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
};

// Bit-for-bit equality of dtype, shape and data.
bool identical(const Tensor& a, const Tensor& b);

// Where the initial value of a parameter or state comes from, opened only when it is read: `plan`
// and `inspect` never touch weights. `load` throws kIo or kInvalidModel.
struct TensorSource {
  std::string description;  // "inline", "weights.bin @4096+1024", "ones", ...
  std::function<Tensor()> load;
};

}  // namespace trainrt
