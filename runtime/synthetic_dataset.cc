// One class per sample: class y has a random prototype, and a sample is the prototype plus noise.
// Labels per element (segmentation): element i of the first input decides label i. Float targets: a
// fixed random sum of a few input elements. Integer inputs: a token repeats a rule of its
// predecessor nine times out of ten (so next tokens can be learned), and with classes is half of
// the time a token that only this class uses at that place.
//
// A step must not wait for its made-up data, so a normal number costs 16 random bits and a look
// into a table.
#include "runtime/synthetic_dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "graph/random.h"

namespace trainrt {

namespace {

// The stream of draws that belong to one purpose and one tensor.
enum Stream : uint64_t { kClass = 1, kPrototype, kNoise, kTarget, kToken };

// Standard normal numbers, 8 of a block of random words: the middles of 2 * kLevels intervals that
// are equally likely, so few that the table stays in the nearest cache.
constexpr int kLevels = 4096;
constexpr int kHalves = 8;   // of 16 bits in a block
constexpr int kBlocks = 16;  // drawn at a time
constexpr int kChunk = kHalves * kBlocks;

// Level k is where the probability of a larger number is (kLevels - 1/2 - k) / (2 kLevels): by
// Newton's method from the level before.
const std::array<float, kLevels>& levels() {
  static const std::array<float, kLevels> table = [] {
    std::array<float, kLevels> made;
    double x = 0;
    for (int k = 0; k < kLevels; ++k) {
      const double above = (kLevels - 0.5 - k) / (2.0 * kLevels);
      constexpr int kSteps = 6;
      for (int step = 0; step < kSteps; ++step) {
        const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
        x += (0.5 * std::erfc(x / std::sqrt(2.0)) - above) / density;
      }
      made[static_cast<size_t>(k)] = static_cast<float>(x);
    }
    return made;
  }();
  return table;
}

float normal_of(const std::array<float, kLevels>& table, uint32_t half) {
  const float x = table[half % kLevels];
  return (half & 0x8000u) != 0 ? -x : x;
}

// The share of normal numbers below that one.
double share_below(uint32_t half) {
  const double beside = (half % kLevels + 0.5) / (2.0 * kLevels);
  return (half & 0x8000u) != 0 ? 0.5 - beside : 0.5 + beside;
}

// Element i of a tensor: half i / kBlocks % kHalves of its chunk's block i % kBlocks.
struct HalfPlace {
  explicit HalfPlace(int64_t i)
      : block(static_cast<uint64_t>(i / kChunk * kBlocks + i % kBlocks)),
        half(static_cast<int>(i % kChunk / kBlocks)) {}
  uint64_t block;
  int half;
};

uint32_t half_of(const RandomBlock& words, int half) {
  return words[static_cast<size_t>(half / 2)] >> (half % 2 * 16) & 0xFFFFu;
}

class SyntheticDataset : public Dataset {
 public:
  SyntheticDataset(uint64_t seed,
                   std::vector<SyntheticInput> inputs,
                   std::optional<SyntheticLabels> labels)
      : seed_(seed), inputs_(std::move(inputs)), labels_(std::move(labels)) {
    for (const SyntheticInput& input : inputs_) {
      arrays_.push_back({.name = input.name,
                         .dtype = input.dtype,
                         .sample_shape = input.sample_shape,
                         .is_labels = false});
    }
    if (labels_) {
      arrays_.push_back({.name = "labels",
                         .dtype = labels_->num_classes > 0 ? DType::kInt64 : DType::kFloat32,
                         .sample_shape = labels_->sample_shape,
                         .is_labels = true});
    }
  }

  std::string description() const override { return "synthetic data"; }
  int64_t num_samples() const override { return kEndlessSamples; }
  const std::vector<DataArray>& arrays() const override { return arrays_; }

  void read(int array, int64_t index, std::byte* out) const override {
    if (array == static_cast<int>(inputs_.size())) {
      read_labels(index, out);
      return;
    }
    const SyntheticInput& input = inputs_[static_cast<size_t>(array)];
    const uint64_t tensor = hash_name(input.name);
    const int64_t n = num_elements(input.sample_shape);
    if (is_floating(input.dtype)) {
      dispatch_all(input.dtype, [&](auto tag) {
        using T = decltype(tag);
        if constexpr (!std::is_integral_v<T>) {
          read_floats<T>(tensor, index, n, out);
        }
      });
      return;
    }
    read_integers(input, tensor, index, out);
  }

 private:
  RandomBlock draw(Stream stream, uint64_t tensor, uint64_t sample, uint64_t i) const {
    return philox(mix_keys(mix_keys(seed_, stream), tensor), sample, i);
  }
  bool one_class() const {
    return labels_ && labels_->num_classes > 0 && num_elements(labels_->sample_shape) == 1;
  }
  int64_t class_of(int64_t sample) const {
    return draw(kClass, 0, static_cast<uint64_t>(sample), 0)[0] % labels_->num_classes;
  }
  uint32_t half(Stream stream, uint64_t tensor, int64_t sample, int64_t i) const {
    const HalfPlace at(i);
    return half_of(draw(stream, tensor, static_cast<uint64_t>(sample), at.block), at.half);
  }

  // Prototype and noise have equal shares of a variance of about 1.
  static float mixed(float prototype, float noise) { return 0.7f * (prototype + noise); }

  // Element i of a float input.
  float element(uint64_t tensor, int64_t sample, int64_t i) const {
    const float noise = normal_of(levels(), half(kNoise, tensor, sample, i));
    return one_class()
               ? mixed(normal_of(levels(), half(kPrototype, tensor, class_of(sample), i)), noise)
               : noise;
  }

  // kChunk normal numbers from element `first` on.
  void normals(Stream stream, uint64_t tensor, int64_t sample, int64_t first, float* to) const {
    const std::array<float, kLevels>& table = levels();
    uint32_t words[4][kBlocks];
    philox_lanes(mix_keys(mix_keys(seed_, stream), tensor),
                 static_cast<uint64_t>(sample),
                 HalfPlace(first).block,
                 words);
    for (int half = 0; half < kHalves; ++half) {
      for (int block = 0; block < kBlocks; ++block) {
        to[half * kBlocks + block] =
            normal_of(table, words[half / 2][block] >> (half % 2 * 16) & 0xFFFFu);
      }
    }
  }

  // element() of all `n`.
  template <typename T>
  void read_floats(uint64_t tensor, int64_t sample, int64_t n, std::byte* out) const {
    const int64_t label = one_class() ? class_of(sample) : -1;
    float chunk[kChunk], prototype[kChunk];
    for (int64_t first = 0; first < n; first += kChunk) {
      normals(kNoise, tensor, sample, first, chunk);
      if (label >= 0) {
        normals(kPrototype, tensor, label, first, prototype);
        for (int i = 0; i < kChunk; ++i) {
          chunk[i] = mixed(prototype[i], chunk[i]);
        }
      }
      T values[kChunk];
      for (int i = 0; i < kChunk; ++i) {
        values[i] = static_cast<T>(chunk[i]);
      }
      const auto count = static_cast<size_t>(std::min<int64_t>(kChunk, n - first));
      std::memcpy(out + first * static_cast<int64_t>(sizeof(T)), values, count * sizeof(T));
    }
  }

  void read_integers(const SyntheticInput& input,
                     uint64_t tensor,
                     int64_t sample,
                     std::byte* out) const {
    const int64_t n = num_elements(input.sample_shape);
    const auto range = static_cast<uint64_t>(input.num_indices);
    const bool has_class = one_class();
    const uint64_t label = has_class ? static_cast<uint64_t>(class_of(sample)) : 0;
    uint64_t previous = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint64_t value = 1;
      if (range > 0) {
        const RandomBlock words =
            draw(kToken, tensor, static_cast<uint64_t>(sample), static_cast<uint64_t>(i));
        value = words[0] % range;
        if (has_class && words[1] % 2 == 0) {
          value = draw(kPrototype, tensor, label, static_cast<uint64_t>(i))[0] % range;
        } else if (!has_class && i > 0 && words[1] % 10 != 0) {
          value = (previous * 5 + 1) % range;
        }
      }
      previous = value;
      dispatch_all(input.dtype, [&](auto tag) {
        using T = decltype(tag);
        if constexpr (std::is_integral_v<T>) {
          const T typed = static_cast<T>(value);
          std::memcpy(out + i * static_cast<int64_t>(sizeof(T)), &typed, sizeof(T));
        }
      });
    }
  }

  void read_labels(int64_t sample, std::byte* out) const {
    const int64_t n = num_elements(labels_->sample_shape);
    for (int64_t i = 0; i < n; ++i) {
      if (labels_->num_classes > 0) {
        const int64_t label = one_class() ? class_of(sample) : element_label(sample, i);
        std::memcpy(out + i * 8, &label, sizeof(label));
      } else {
        const auto target = static_cast<float>(target_of(sample, i));
        std::memcpy(out + i * 4, &target, sizeof(target));
      }
    }
  }

  // The class of element i: equally likely intervals of the normal distribution.
  int64_t element_label(int64_t sample, int64_t i) const {
    if (inputs_.empty() || !is_floating(inputs_[0].dtype)) {
      return i % labels_->num_classes;
    }
    const int64_t n = num_elements(inputs_[0].sample_shape);
    // The element is noise alone: there is no one class.
    const double u = share_below(half(kNoise, hash_name(inputs_[0].name), sample, i % n));
    return static_cast<int64_t>(u * static_cast<double>(labels_->num_classes));
  }

  double target_of(int64_t sample, int64_t i) const {
    constexpr int kTerms = 8;
    double sum = 0;
    for (const SyntheticInput& input : inputs_) {
      if (!is_floating(input.dtype)) {
        continue;
      }
      const auto n = static_cast<uint64_t>(num_elements(input.sample_shape));
      const uint64_t tensor = hash_name(input.name);
      for (uint64_t k = 0; k < kTerms && n > 0; ++k) {
        const RandomBlock words = draw(kTarget, tensor, static_cast<uint64_t>(i), k);
        const double x = element(tensor, sample, static_cast<int64_t>(words[0] % n));
        sum += (words[1] % 2 == 0 ? x : -x) / std::sqrt(double{kTerms});
      }
    }
    return sum;
  }

  uint64_t seed_;
  std::vector<SyntheticInput> inputs_;
  std::optional<SyntheticLabels> labels_;
  std::vector<DataArray> arrays_;
};

}  // namespace

std::unique_ptr<Dataset> make_synthetic_dataset(uint64_t seed,
                                                std::vector<SyntheticInput> inputs,
                                                std::optional<SyntheticLabels> labels) {
  return std::make_unique<SyntheticDataset>(seed, std::move(inputs), std::move(labels));
}

namespace {

// The sizes of the axes of its data that a node addresses by the elements of its input 1; empty
// when that input holds no indices.
Shape indexed_sizes(const Graph& graph, const Node& node) {
  static const std::set<std::string> kAlongAxis = {"Gather", "GatherElements", "ScatterElements"};
  if (node.inputs.size() < 2) {
    return {};
  }
  const Shape& data = graph.value(node.inputs[0]).type.shape;
  if (kAlongAxis.count(node.op_type) != 0) {
    const int axis =
        normalize_axis(node.attributes.get_int("axis", 0), static_cast<int>(data.size()));
    return {data[static_cast<size_t>(axis)]};
  }
  if (node.op_type == "GatherND" || node.op_type == "ScatterND") {
    const auto first = data.begin() + node.attributes.get_int("batch_dims", 0);
    return {first, first + graph.value(node.inputs[1]).type.shape.back()};
  }
  return {};
}

}  // namespace

IndexSizes index_sizes_of(const Graph& graph, ValueId input) {
  static const std::set<std::string> kPassing = {
      "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Identity", "Flatten"};
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  std::vector<ValueId> to_visit = {input};
  IndexSizes sizes;
  const auto lower = [](int64_t& size, int64_t to) { size = size == 0 ? to : std::min(size, to); };
  while (!to_visit.empty()) {
    const ValueId id = to_visit.back();
    to_visit.pop_back();
    for (const NodeId reader : consumers[static_cast<size_t>(id)]) {
      const Node& node = graph.node(reader);
      const bool as_indices = node.inputs.size() > 1 && node.inputs[1] == id;
      const Shape axes = as_indices ? indexed_sizes(graph, node) : Shape{};
      if (!axes.empty()) {
        lower(sizes.smallest, *std::min_element(axes.begin(), axes.end()));
        lower(sizes.largest, *std::max_element(axes.begin(), axes.end()));
      } else if (kPassing.count(node.op_type) != 0 && node.inputs[0] == id) {
        to_visit.push_back(node.outputs[0]);
      }
    }
  }
  return sizes;
}

}  // namespace trainrt
