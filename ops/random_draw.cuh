// The draws of ops/random_draw.h, element by element, on a CUDA device.
#pragma once

#include "graph/random.h"
#include "ops/broadcast.h"
#include "ops/launch.cuh"
#include "ops/random_draw.h"

namespace trainrt {

class DeviceDraws {
 public:
  explicit DeviceDraws(const DrawSource& source)
      : ndim_(static_cast<int>(source.layout.shape.size())),
        batch_axis_(source.layout.batch_axis),
        sample_stride_(source.layout.sample_stride),
        num_samples_(source.layout.num_samples),
        key_(source.key),
        first_sample_(source.first_sample) {
    TRAINRT_REQUIRE(ndim_ <= kMaxDims, kUnsupported, "random numbers for ", ndim_, " dims");
    for (size_t d = 0; d < source.layout.shape.size(); ++d) {
      dims_[d] = source.layout.shape[d];
      offsets_[d] = source.layout.offsets[d];
      strides_[d] = source.layout.sample_strides[d];
    }
  }

  // Neighbours of an element along the last dim, which share all that takes divisions.
  struct Row {
    uint64_t key, sample;
    int64_t element, stride;
    // The draw of the neighbour j further on.
    TRAINRT_HOST_DEVICE uint32_t operator[](int64_t j) const {
      const int64_t at = element + j * stride;
      const RandomBlock block = philox(key, static_cast<uint64_t>(at / 4), sample);
      // Not block[at % 4], which would put the block into local memory.
      const int64_t word = at % 4;
      return word == 0 ? block[0] : word == 1 ? block[1] : word == 2 ? block[2] : block[3];
    }
  };

  // The neighbours of element i.
  TRAINRT_HOST_DEVICE Row row(int64_t i) const {
    int64_t sample = 0, element = 0;
    for (int d = ndim_ - 1; d >= 0; --d) {
      int64_t position = offsets_[d] + i % dims_[d];
      i /= dims_[d];
      if (d == batch_axis_) {
        sample = position / sample_stride_ % num_samples_;
        position =
            position / (sample_stride_ * num_samples_) * sample_stride_ + position % sample_stride_;
      }
      element += position * strides_[d];
    }
    return {key_,
            first_sample_ + static_cast<uint64_t>(sample),
            element,
            ndim_ > 0 ? strides_[ndim_ - 1] : 0};
  }

  // The draw of element i of the tensor.
  TRAINRT_HOST_DEVICE uint32_t operator()(int64_t i) const { return row(i)[0]; }

  // Those of the elements [i, i + 4): one block, as a rule.
  TRAINRT_HOST_DEVICE RandomBlock four(int64_t i) const {
    const Row first = row(i);
    const int64_t length = ndim_ > 0 ? dims_[ndim_ - 1] : 1;
    if (batch_axis_ != ndim_ - 1 && first.stride == 1 && first.element % 4 == 0 &&
        length % 4 == 0 && i % 4 == 0) {
      return philox(key_, static_cast<uint64_t>(first.element / 4), first.sample);
    }
    return {first[0], (*this)(i + 1), (*this)(i + 2), (*this)(i + 3)};
  }

 private:
  int ndim_, batch_axis_;
  int64_t sample_stride_, num_samples_;
  uint64_t key_, first_sample_;
  int64_t dims_[kMaxDims] = {}, offsets_[kMaxDims] = {}, strides_[kMaxDims] = {};
};

// A draw is kept by dropout if it is at least this.
inline uint32_t drop_threshold(double ratio) {
  const double limit = ratio * 0x1p32;
  return static_cast<uint32_t>(limit < 4294967295.0 ? limit : 4294967295.0);
}
inline double drop_scale(double ratio) {
  return ratio < 1 ? 1 / (1 - ratio) : 0;
}

}  // namespace trainrt
