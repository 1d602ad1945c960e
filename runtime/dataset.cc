#include "runtime/dataset.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "graph/base/error.h"

namespace trainrt {

std::optional<int> Dataset::find_array(const std::string& name) const {
  for (size_t i = 0; i < arrays().size(); ++i) {
    if (arrays()[i].name == name) {
      return static_cast<int>(i);
    }
  }
  return std::nullopt;
}

namespace {

class MemoryDataset : public Dataset {
 public:
  MemoryDataset(std::string description,
                std::vector<DataArray> arrays,
                std::vector<Tensor> tensors,
                std::vector<int> batch_axes)
      : description_(std::move(description)),
        arrays_(std::move(arrays)),
        tensors_(std::move(tensors)),
        batch_axes_(std::move(batch_axes)) {
    TRAINRT_REQUIRE(!tensors_.empty(), kInvalidArgument, "'", description_, "' holds no array");
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Shape& shape = tensors_[i].shape();
      const int axis = batch_axes_[i];
      TRAINRT_REQUIRE(axis >= 0 && axis < static_cast<int>(shape.size()),
                      kInvalidArgument,
                      "'",
                      description_,
                      "': array '",
                      arrays_[i].name,
                      "' has shape ",
                      shape_string(shape),
                      " and no axis ",
                      axis,
                      " that enumerates samples; see --batch-axis");
      const int64_t count = shape[static_cast<size_t>(axis)];
      TRAINRT_REQUIRE(i == 0 || count == num_samples_,
                      kInvalidArgument,
                      "'",
                      description_,
                      "': array '",
                      arrays_[0].name,
                      "' has ",
                      num_samples_,
                      " samples, array '",
                      arrays_[i].name,
                      "' has ",
                      count,
                      way_out(i, count));
      num_samples_ = count;
      arrays_[i].dtype = tensors_[i].dtype();
      arrays_[i].sample_shape = shape;
      arrays_[i].sample_shape.erase(arrays_[i].sample_shape.begin() + axis);
    }
    TRAINRT_REQUIRE(num_samples_ > 0, kInvalidArgument, "'", description_, "' holds no sample");
  }

  std::string description() const override { return description_; }
  int64_t num_samples() const override { return num_samples_; }
  const std::vector<DataArray>& arrays() const override { return arrays_; }

  void read(int array, int64_t index, std::byte* out) const override {
    const Tensor& tensor = tensors_[static_cast<size_t>(array)];
    const int axis = batch_axes_[static_cast<size_t>(array)];
    const int ndim = static_cast<int>(tensor.shape().size());
    const int64_t outer = dims_product(tensor.shape(), 0, axis);
    const int64_t inner_bytes =
        dims_product(tensor.shape(), axis + 1, ndim) * dtype_bytes(tensor.dtype());
    for (int64_t o = 0; o < outer; ++o) {
      std::memcpy(out + o * inner_bytes,
                  tensor.raw() + (o * num_samples_ + index) * inner_bytes,
                  static_cast<size_t>(inner_bytes));
    }
  }

 private:
  // Where array `i` or the first one has the other's samples along another axis.
  std::string way_out(size_t i, int64_t count) const {
    for (const auto& [at, wanted] : {std::pair(i, num_samples_), std::pair(size_t{0}, count)}) {
      const Shape& shape = tensors_[at].shape();
      const auto axis = std::find(shape.begin(), shape.end(), wanted);
      if (axis != shape.end()) {
        return concat("; if the samples of '",
                      arrays_[at].name,
                      "' lie along axis ",
                      axis - shape.begin(),
                      ", where there are ",
                      wanted,
                      ", use --batch-axis ",
                      arrays_[at].name,
                      "=",
                      axis - shape.begin());
      }
    }
    return "; arrays that are not to be read may have any length where --input NAME=ARRAY and "
           "--labels ARRAY name those that are";
  }

  std::string description_;
  std::vector<DataArray> arrays_;
  std::vector<Tensor> tensors_;
  std::vector<int> batch_axes_;
  int64_t num_samples_ = 0;
};

}  // namespace

std::unique_ptr<Dataset> make_memory_dataset(std::string description,
                                             std::vector<DataArray> arrays,
                                             std::vector<Tensor> tensors,
                                             std::vector<int> batch_axes) {
  return std::make_unique<MemoryDataset>(
      std::move(description), std::move(arrays), std::move(tensors), std::move(batch_axes));
}

}  // namespace trainrt
