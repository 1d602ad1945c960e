// A producer thread and two buffers: while the executor works on one step the next is read. Buffers
// are used again, so after the first steps nothing is allocated.
#include "runtime/data_loader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

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

// Whether `To` has a value for each of `From`, which is asked of integers only.
template <typename To, typename From>
constexpr bool holds_all() {
  using Limits = std::numeric_limits<From>;
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To> && !std::is_same_v<From, bool> &&
                !std::is_same_v<To, bool>) {
    return std::in_range<To>(Limits::min()) && std::in_range<To>(Limits::max());
  } else {
    return true;
  }
}

// The first of `n` integers that an element of `to_dtype` cannot hold; -1: none.
int64_t first_too_large(DType from_dtype, const std::byte* from, DType to_dtype, int64_t n) {
  int64_t found = -1;
  dispatch_all(from_dtype, [&](auto from_tag) {
    dispatch_all(to_dtype, [&](auto to_tag) {
      using From = decltype(from_tag);
      using To = decltype(to_tag);
      if constexpr (!holds_all<To, From>()) {
        for (int64_t i = 0; i < n && found < 0; ++i) {
          From value;
          std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
          found = std::in_range<To>(value) ? -1 : i;
        }
      }
    });
  });
  return found;
}

// Writes sample `s` of `batch` into a tensor [outer, batch, inner]; the sample is [outer, inner].
void place_sample(const InputBinding& binding,
                  const Shape& sample_shape,
                  const std::byte* sample,
                  int64_t s,
                  int64_t batch,
                  std::byte* tensor) {
  const int ndim = static_cast<int>(sample_shape.size());
  const int64_t outer = dims_product(sample_shape, 0, binding.batch_axis);
  const int64_t inner =
      dims_product(sample_shape, binding.batch_axis, ndim) * dtype_bytes(binding.dtype);
  for (int64_t o = 0; o < outer; ++o) {
    std::memcpy(tensor + (o * batch + s) * inner, sample + o * inner, static_cast<size_t>(inner));
  }
}

// A sample's shape at `length` tokens; 0: as it is.
Shape cut_shape(const InputBinding& binding, int64_t length) {
  Shape shape = binding.sample_shape;
  if (length > 0 && binding.token_axis >= 0) {
    shape[static_cast<size_t>(binding.token_axis)] = length;
  }
  return shape;
}

// Samples as an input wants them: converted, cut to a length, and with labels only for tokens that
// are there. Buffers are used again.
class SampleReader {
 public:
  SampleReader(const Dataset& dataset, const LoaderOptions& options)
      : dataset_(dataset), options_(options) {}

  // Valid until the next call.
  const std::byte* read(const InputBinding& binding, int64_t sample, int64_t length) {
    const DataArray& array = dataset_.arrays()[static_cast<size_t>(binding.array)];
    const int64_t elements = num_elements(binding.sample_shape);
    raw_.resize(static_cast<size_t>(elements * dtype_bytes(array.dtype)));
    whole_.resize(static_cast<size_t>(elements * dtype_bytes(binding.dtype)));
    dataset_.read(binding.array, sample, raw_.data());
    require_room(binding, array, sample);
    convert_elements(array.dtype, raw_.data(), binding.dtype, whole_.data(), elements);
    if (binding.probabilities) {
      require_probabilities(binding, array, sample);
    }
    if (binding.token_axis < 0) {
      return whole_.data();
    }
    if (binding.past_end && options_.length_of) {
      ignore_from(binding, options_.length_of(sample));
    }
    return length > 0 ? cut(binding, length) : whole_.data();
  }

 private:
  std::string place_of(const DataArray& array, int64_t sample) const {
    return concat("sample ", sample, " of array '", array.name, "' of ", dataset_.description());
  }

  // Integers are never cut to fewer bits: 2^32 would be read as 0.
  void require_room(const InputBinding& binding, const DataArray& array, int64_t sample) const {
    const int64_t at = first_too_large(
        array.dtype, raw_.data(), binding.dtype, num_elements(binding.sample_shape));
    TRAINRT_REQUIRE(at < 0,
                    kInvalidArgument,
                    place_of(array, sample),
                    " holds, as element ",
                    at,
                    ", a number that ",
                    dtype_name(binding.dtype),
                    " of input '",
                    binding.input,
                    "' cannot be");
  }

  // No other target has a loss that is never negative, and -100 ignores class labels only.
  void require_probabilities(const InputBinding& binding,
                             const DataArray& array,
                             int64_t sample) const {
    Tensor values(binding.dtype, binding.sample_shape);
    std::memcpy(values.raw(), whole_.data(), whole_.size());
    const std::vector<double> targets = values.to_double();
    const auto at = std::find_if(
        targets.begin(), targets.end(), [](double target) { return target < 0 || target > 1; });
    TRAINRT_REQUIRE(at == targets.end(),
                    kInvalidArgument,
                    place_of(array, sample),
                    " holds ",
                    at == targets.end() ? 0.0 : *at,
                    ", as element ",
                    at - targets.begin(),
                    "; loss bce_with_logits wants targets from 0 to 1 (labels that are to be "
                    "ignored have only losses over classes)");
  }

  // Dims of the sample around its token axis, the inner ones in bytes.
  struct Around {
    int64_t outer, tokens, inner_bytes;
  };
  static Around around(const InputBinding& binding) {
    const int ndim = static_cast<int>(binding.sample_shape.size());
    return {dims_product(binding.sample_shape, 0, binding.token_axis),
            binding.sample_shape[static_cast<size_t>(binding.token_axis)],
            dims_product(binding.sample_shape, binding.token_axis + 1, ndim) *
                dtype_bytes(binding.dtype)};
  }

  void ignore_from(const InputBinding& binding, int64_t first) {
    const Around dims = around(binding);
    const Tensor value = Tensor::scalar(*binding.past_end).cast(binding.dtype);
    for (int64_t o = 0; o < dims.outer; ++o) {
      std::byte* at = whole_.data() + (o * dims.tokens + first) * dims.inner_bytes;
      const std::byte* end = whole_.data() + (o + 1) * dims.tokens * dims.inner_bytes;
      for (; at < end; at += value.bytes()) {
        std::memcpy(at, value.raw(), static_cast<size_t>(value.bytes()));
      }
    }
  }

  const std::byte* cut(const InputBinding& binding, int64_t length) {
    const Around dims = around(binding);
    const size_t run = static_cast<size_t>(length * dims.inner_bytes);
    cut_.resize(static_cast<size_t>(dims.outer) * run);
    for (int64_t o = 0; o < dims.outer; ++o) {
      std::memcpy(cut_.data() + static_cast<size_t>(o) * run,
                  whole_.data() + o * dims.tokens * dims.inner_bytes,
                  run);
    }
    return cut_.data();
  }

  const Dataset& dataset_;
  const LoaderOptions& options_;
  std::vector<std::byte> raw_, whole_, cut_;
};

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
  TRAINRT_REQUIRE(!is_permuted(source.sample_shape, binding.sample_shape),
                  kInvalidArgument,
                  found,
                  ", the same dims in another order; transpose the array, since a reshape would "
                  "scramble it");
  return binding;
}

bool is_permuted(const Shape& a, const Shape& b) {
  const auto without_ones = [](Shape shape) {
    shape.erase(std::remove(shape.begin(), shape.end(), 1), shape.end());
    return shape;
  };
  const Shape from = without_ones(a), to = without_ones(b);
  return from != to && std::is_permutation(from.begin(), from.end(), to.begin(), to.end());
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset,
                       std::vector<InputBinding> bindings,
                       LoaderOptions options,
                       Arrange arrange)
    : dataset_(std::move(dataset)),
      bindings_(std::move(bindings)),
      options_(std::move(options)),
      arrange_(std::move(arrange)) {
  for (size_t i = 0; i < kBuffers + (options_.peeks ? 1 : 0); ++i) {
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

// Until there is a step's data, or none will come.
void DataLoader::await_ready(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return !ready_.empty() || finished_ || error_; });
  if (ready_.empty() && error_) {
    std::rethrow_exception(error_);
  }
}

const StepData* DataLoader::peek() {
  TRAINRT_CHECK(options_.peeks);
  std::unique_lock lock(mutex_);
  await_ready(lock);
  return ready_.empty() ? nullptr : ready_.front().get();
}

const StepData* DataLoader::next() {
  std::unique_lock lock(mutex_);
  if (current_) {
    spare_.push_back(std::move(current_));
    changed_.notify_all();
  }
  await_ready(lock);
  if (ready_.empty()) {
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
      choose_samples(*data);
      arrange_(*data);
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

void DataLoader::choose_samples(StepData& data) const {
  const int64_t n = dataset_->num_samples();
  data.samples.clear();
  for (int64_t p = data.position; p < data.position + data.num_samples; ++p) {
    data.samples.push_back(options_.shuffle && n != kEndlessSamples
                               ? shuffled_index(options_.seed, p / n, n, p % n)
                               : p % n);
  }
}

void DataLoader::make_tensors(StepData& data) const {
  data.inputs.resize(data.work.micro_batches.size());
  for (size_t m = 0; m < data.inputs.size(); ++m) {
    const MicroBatch& micro_batch = data.work.micro_batches[m];
    data.inputs[m].resize(bindings_.size());
    for (size_t b = 0; b < bindings_.size(); ++b) {
      const InputBinding& binding = bindings_[b];
      Shape shape = cut_shape(binding, micro_batch.length);
      shape.insert(shape.begin() + binding.batch_axis, micro_batch.num_samples);
      Tensor& tensor = data.inputs[m][b];
      if (!tensor.defined() || tensor.shape() != shape) {
        tensor = options_.make_tensor ? options_.make_tensor(binding.dtype, shape)
                                      : Tensor(binding.dtype, shape);
      }
    }
  }
}

void DataLoader::fill(StepData& data) const {
  make_tensors(data);
  std::vector<std::pair<size_t, int64_t>> places;  // micro-batch, and sample in it
  int64_t bytes = 0;
  for (size_t m = 0; m < data.inputs.size(); ++m) {
    for (int64_t s = 0; s < data.work.micro_batches[m].num_samples; ++s) {
      places.emplace_back(m, s);
    }
    for (const Tensor& tensor : data.inputs[m]) {
      bytes += tensor.bytes();
    }
  }
  const auto read = [&](size_t first, size_t last) {
    SampleReader reader(*dataset_, options_);
    for (size_t i = first; i < last; ++i) {
      const auto [m, s] = places[i];
      const MicroBatch& micro_batch = data.work.micro_batches[m];
      const int64_t sample = data.samples[static_cast<size_t>(micro_batch.first_sample + s)];
      for (size_t b = 0; b < bindings_.size(); ++b) {
        const InputBinding& binding = bindings_[b];
        const std::byte* contents = reader.read(binding, sample, micro_batch.length);
        place_sample(binding,
                     cut_shape(binding, micro_batch.length),
                     contents,
                     s,
                     micro_batch.num_samples,
                     data.inputs[m][b].raw());
      }
    }
  };
  // A thread takes some ten microseconds to start, a MiB a hundred or more to be read.
  constexpr int64_t kLeastOfThread = 1 << 20;
  const auto threads = static_cast<size_t>(
      std::clamp<int64_t>(bytes / kLeastOfThread, 1, std::max(1, options_.threads)));
  std::vector<std::exception_ptr> errors(threads);
  const auto read_part = [&](size_t part) {
    try {
      read(places.size() * part / threads, places.size() * (part + 1) / threads);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t part = 1; part < threads; ++part) {
      others.emplace_back(read_part, part);
    }
    read_part(0);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);  // of the first sample that has one, as with one thread
    }
  }
}

}  // namespace trainrt
