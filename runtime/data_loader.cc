// A producer thread and two buffers: while the executor works on one step the next is read. Buffers
// are used again, so after the first steps nothing is allocated.
#include "runtime/data_loader.h"

#include <algorithm>
#include <cstring>

#include "graph/printer.h"
#include "runtime/sample_order.h"

namespace trainrt {

namespace {

constexpr size_t kBuffers = 2;

// Conversion of `n` elements; From and To are element types of tensors.
template <typename From, typename To>
void convert(const std::byte* from, std::byte* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    From source;
    std::memcpy(&source, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    To target;
    if constexpr (std::is_same_v<From, uint8_t> && !std::is_integral_v<To>) {
      target = static_cast<To>(static_cast<float>(source) / 255.0f);
      if constexpr (std::is_same_v<To, double>) {
        target = static_cast<double>(source) / 255.0;
      }
    } else if constexpr (std::is_arithmetic_v<From> && std::is_arithmetic_v<To>) {
      target = static_cast<To>(source);
    } else if constexpr (std::is_same_v<From, double>) {
      target = static_cast<To>(static_cast<float>(source));
    } else if constexpr (std::is_arithmetic_v<To>) {
      target = static_cast<To>(static_cast<float>(source));
    } else {
      target = static_cast<To>(static_cast<float>(source));
    }
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &target, sizeof(To));
  }
}

void convert_elements(
    DType from_dtype, const std::byte* from, DType to_dtype, std::byte* to, int64_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(n * dtype_bytes(to_dtype)));
    return;
  }
  dispatch_all(from_dtype, [&](auto from_tag) {
    dispatch_all(to_dtype,
                 [&](auto to_tag) { convert<decltype(from_tag), decltype(to_tag)>(from, to, n); });
  });
}

// Writes sample `s` of `batch` into a tensor whose batch axis is not the first: [outer, batch,
// inner].
void place_sample(const InputBinding& binding,
                  const std::byte* sample,
                  int64_t s,
                  int64_t batch,
                  std::byte* tensor) {
  const int ndim = static_cast<int>(binding.sample_shape.size());
  const int64_t outer = dims_product(binding.sample_shape, 0, binding.batch_axis);
  const int64_t inner =
      dims_product(binding.sample_shape, binding.batch_axis, ndim) * dtype_bytes(binding.dtype);
  for (int64_t o = 0; o < outer; ++o) {
    std::memcpy(tensor + (o * batch + s) * inner, sample + o * inner, static_cast<size_t>(inner));
  }
}

}  // namespace

InputBinding bind_input(const Value& input, const Dataset& dataset, int array) {
  const DataArray& source = dataset.arrays().at(static_cast<size_t>(array));
  InputBinding binding{
      input.name, array, input.type.dtype, input.type.shape, std::max(0, input.batch_axis)};
  TRAINRT_REQUIRE(input.batch_axis >= 0,
                  kInvalidArgument,
                  "input '",
                  input.name,
                  "' has no axis that enumerates samples, so data cannot fill it; name the axis "
                  "with --batch-axis ",
                  input.name,
                  "=K");
  binding.sample_shape.erase(binding.sample_shape.begin() + input.batch_axis);
  const std::string found = concat("array '",
                                   source.name,
                                   "' of ",
                                   dataset.description(),
                                   " holds ",
                                   type_string({source.dtype, source.sample_shape}),
                                   " per sample, input '",
                                   input.name,
                                   "' wants ",
                                   type_string({binding.dtype, binding.sample_shape}));
  TRAINRT_REQUIRE(num_elements(source.sample_shape) == num_elements(binding.sample_shape),
                  kInvalidArgument,
                  found);
  TRAINRT_REQUIRE(
      is_floating(binding.dtype) || !is_floating(source.dtype), kInvalidArgument, found);
  return binding;
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset,
                       std::vector<InputBinding> bindings,
                       LoaderOptions options,
                       MicroBatchesOf micro_batches)
    : dataset_(std::move(dataset)),
      bindings_(std::move(bindings)),
      options_(options),
      micro_batches_(std::move(micro_batches)) {
  for (size_t i = 0; i < kBuffers; ++i) {
    spare_.push_back(std::make_unique<StepData>());
  }
  thread_ = std::thread([this] { produce(); });
}

DataLoader::~DataLoader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

const StepData* DataLoader::next() {
  std::unique_lock lock(mutex_);
  if (current_) {
    spare_.push_back(std::move(current_));
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return !ready_.empty() || finished_ || error_; });
  if (ready_.empty()) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    return nullptr;
  }
  current_ = std::move(ready_.front());
  ready_.pop_front();
  return current_.get();
}

void DataLoader::produce() {
  int64_t position = options_.start;
  try {
    while (position < options_.stop) {
      std::unique_ptr<StepData> data;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || !spare_.empty(); });
        if (stopping_) {
          return;
        }
        data = std::move(spare_.front());
        spare_.pop_front();
      }
      data->position = position;
      data->num_samples = std::min(samples_at(position, options_.batch, dataset_->num_samples()),
                                   options_.stop - position);
      fill(*data);
      position += data->num_samples;
      const std::lock_guard lock(mutex_);
      ready_.push_back(std::move(data));
      changed_.notify_all();
    }
    const std::lock_guard lock(mutex_);
    finished_ = true;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
  }
  changed_.notify_all();
}

void DataLoader::fill(StepData& data) const {
  const std::vector<MicroBatch>& micro_batches = micro_batches_(data.num_samples);
  const int64_t n = dataset_->num_samples();
  std::vector<std::byte> raw, sample;
  data.inputs.resize(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const int64_t batch = micro_batches[m].num_samples;
    data.inputs[m].resize(bindings_.size());
    for (size_t b = 0; b < bindings_.size(); ++b) {
      const InputBinding& binding = bindings_[b];
      const DataArray& array = dataset_->arrays()[static_cast<size_t>(binding.array)];
      Shape shape = binding.sample_shape;
      shape.insert(shape.begin() + binding.batch_axis, batch);
      Tensor& tensor = data.inputs[m][b];
      if (!tensor.defined() || tensor.shape() != shape) {
        tensor = Tensor(binding.dtype, shape);
      }
      const int64_t elements = num_elements(binding.sample_shape);
      raw.resize(static_cast<size_t>(elements * dtype_bytes(array.dtype)));
      sample.resize(static_cast<size_t>(elements * dtype_bytes(binding.dtype)));
      for (int64_t s = 0; s < batch; ++s) {
        const int64_t position = data.position + micro_batches[m].first_sample + s;
        const int64_t epoch = position / n;
        const int64_t index = options_.shuffle && n != kEndlessSamples
                                  ? shuffled_index(options_.seed, epoch, n, position % n)
                                  : position % n;
        dataset_->read(binding.array, index, raw.data());
        if (binding.batch_axis == 0) {
          convert_elements(array.dtype,
                           raw.data(),
                           binding.dtype,
                           tensor.raw() + s * static_cast<int64_t>(sample.size()),
                           elements);
        } else {
          convert_elements(array.dtype, raw.data(), binding.dtype, sample.data(), elements);
          place_sample(binding, sample.data(), s, batch, tensor.raw());
        }
      }
    }
  }
}

}  // namespace trainrt
