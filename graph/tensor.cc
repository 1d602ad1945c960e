#include "graph/tensor.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "graph/convert_number.h"

namespace trainrt {

namespace {

constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 register

std::shared_ptr<void> allocate_zeroed(size_t bytes) {
  const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, padded == 0 ? kAlignment : padded);
  TRAINRT_REQUIRE(data != nullptr, kOutOfMemory, "the host cannot allocate ", bytes, " bytes");
  std::memset(data, 0, bytes);
  return {data, std::free};
}

template <typename To>
std::vector<To> to_vector(const Tensor& tensor) {
  std::vector<To> values(tensor.num_elements());
  dispatch_all(tensor.dtype(), [&](auto tag) {
    using From = decltype(tag);
    const From* data = tensor.data<From>();
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = convert_number<To>(data[i]);
    }
  });
  return values;
}

}  // namespace

Tensor::Tensor(DType dtype, Shape shape) : dtype_(dtype), shape_(std::move(shape)) {
  owner_ = allocate_zeroed(static_cast<size_t>(bytes()));
  data_ = static_cast<std::byte*>(owner_.get());
}

Tensor::Tensor(DType dtype, Shape shape, std::shared_ptr<void> owner, std::byte* data)
    : dtype_(dtype), shape_(std::move(shape)), owner_(std::move(owner)), data_(data) {}

Tensor Tensor::clone() const {
  Tensor copy(dtype_, shape_);
  std::memcpy(copy.data_, data_, static_cast<size_t>(bytes()));
  return copy;
}

Tensor Tensor::reshaped(Shape shape) const {
  Tensor view = *this;
  view.shape_ = std::move(shape);
  TRAINRT_CHECK(view.num_elements() == num_elements(),
                "reshape ",
                shape_string(shape_),
                " to ",
                shape_string(view.shape_));
  return view;
}

Tensor Tensor::cast(DType dtype) const {
  Tensor copy(dtype, shape_);
  const int64_t count = num_elements();
  dispatch_all(dtype_, [&](auto from_tag) {
    using From = decltype(from_tag);
    dispatch_all(dtype, [&](auto to_tag) {
      using To = decltype(to_tag);
      const From* from = data<From>();
      To* to = copy.data<To>();
      for (int64_t i = 0; i < count; ++i) {
        to[i] = convert_number<To>(from[i]);
      }
    });
  });
  return copy;
}

std::vector<int64_t> Tensor::to_int64() const {
  return to_vector<int64_t>(*this);
}

std::vector<double> Tensor::to_double() const {
  return to_vector<double>(*this);
}

bool identical(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.bytes())) == 0;
}

}  // namespace trainrt
