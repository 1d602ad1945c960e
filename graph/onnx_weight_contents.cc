#include "graph/onnx_weight_contents.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <map>

namespace trainrt {

namespace {

// Largest tensor whose contents are looked at to tell what it is.
constexpr int64_t kMaxInspectedElements = 4 << 20;
// An additive mask holds numbers of this size where attention must not look.
constexpr double kMaskMagnitude = 1e4;

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

// As a word of its own ("rotary.sin_cached"), not within one ("single_emb").
bool has_word(const std::string& name, const std::string& word) {
  const auto is_letter = [&](size_t at) {
    return at < name.size() && std::isalpha(static_cast<unsigned char>(name[at])) != 0;
  };
  for (size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
    if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + word.size())) {
      return true;
    }
  }
  return false;
}

double element_at(const Tensor& tensor, int64_t at) {
  double result = 0;
  dispatch_all(tensor.dtype(), [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
      result = static_cast<double>(static_cast<float>(tensor.data<T>()[at]));
    } else {
      result = static_cast<double>(tensor.data<T>()[at]);
    }
  });
  return result;
}

// Some elements of a weight, as a vector, without the rest where that can be.
Tensor elements(const Value& value,
                const WeightCandidate& candidate,
                int64_t first,
                int64_t count) {
  if (candidate.peek != nullptr) {
    return candidate.peek(first, count);
  }
  const Tensor whole = value.source.load();
  Tensor part(whole.dtype(), {count});
  const int64_t size = dtype_bytes(whole.dtype());
  std::memcpy(part.raw(), whole.raw() + first * size, static_cast<size_t>(count * size));
  return part;
}

// Infinities; or huge negative numbers in one size beside zeros, if anything: a bias may be huge,
// too, but is not so made.
bool is_mask(const Tensor& tensor) {
  double huge = 0;
  bool only_zeros_beside = true;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const double element = element_at(tensor, i);  // a NaN is damage and no mask
    if (std::isinf(element)) {
      return true;
    }
    if (element <= -kMaskMagnitude && (huge == 0 || huge == element)) {
      huge = element;
    } else {
      only_zeros_beside = only_zeros_beside && element == 0;
    }
  }
  return huge != 0 && only_zeros_beside;
}

// Sines and cosines of positions lie in [-1, 1], and position 0 gives zeros and ones alone. Names
// decide between them and weights that happen to start so, but no weight starts with a row that
// alternates 0, 1, 0, 1 ... as the interleaved table of the first Transformer does. The first row
// tells most weights apart, before all of them are read.
bool may_be_position_table(const Value& value, const WeightCandidate& candidate) {
  if (num_elements(value.type.shape) == 0) {
    return false;
  }
  if (contains(value.name, "inv_freq")) {
    return element_at(elements(value, candidate, 0, 1), 0) == 1;
  }
  int64_t width = 1, dims = 0;
  for (const int64_t dim : value.type.shape) {
    if (dim != 1) {
      width = dim;
      ++dims;
    }
  }
  if (dims < 2) {
    return false;
  }
  const Tensor row = elements(value, candidate, 0, width);
  const auto first_row_is = [&](auto&& expected) {
    for (int64_t i = 0; i < width; ++i) {
      if (element_at(row, i) != expected(i)) {
        return false;
      }
    }
    return true;
  };
  return (width >= 4 && first_row_is([](int64_t i) { return i % 2 == 0 ? 0.0 : 1.0; })) ||
         (has_word(value.name, "cos") && first_row_is([](int64_t) { return 1.0; })) ||
         (has_word(value.name, "sin") && first_row_is([](int64_t) { return 0.0; }));
}

bool is_position_table(const Value& value, const WeightCandidate& candidate) {
  if (!may_be_position_table(value, candidate)) {
    return false;
  }
  const std::vector<double> data = value.source.load().to_double();
  if (!std::all_of(data.begin(), data.end(), [](double x) { return std::abs(x) <= 1; })) {
    return false;
  }
  return contains(value.name, "inv_freq")
             ? std::is_sorted(data.rbegin(), data.rend())
             : std::any_of(data.begin(), data.end(), [&](double x) { return x != data[0]; });
}

double element(const Tensor& matrix, int64_t row, int64_t column) {
  return element_at(matrix, row * matrix.shape()[1] + column);
}

// Equal for a matrix and its transpose, and cheap.
using Corners = std::array<double, 6>;
Corners corners(const Value& value, const WeightCandidate& candidate) {
  const int64_t rows = value.type.shape[0];
  const int64_t columns = value.type.shape[1];
  const auto corner = [&](int64_t at) { return element_at(elements(value, candidate, at, 1), 0); };
  const double a = corner(columns - 1);
  const double b = corner((rows - 1) * columns);
  return {static_cast<double>(std::min(rows, columns)),
          static_cast<double>(std::max(rows, columns)),
          corner(0),
          corner(rows * columns - 1),
          std::min(a, b),
          std::max(a, b)};
}

bool equal(const Tensor& a, const Tensor& b, bool transposed) {
  const int64_t rows = a.shape()[0];
  const int64_t columns = a.shape()[1];
  if (b.shape() != (transposed ? Shape{columns, rows} : a.shape())) {
    return false;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      if (element(a, i, j) != (transposed ? element(b, j, i) : element(b, i, j))) {
        return false;
      }
    }
  }
  return true;
}

bool is_inspected(const Value& value, bool inlined) {
  return inlined && num_elements(value.type.shape) <= kMaxInspectedElements;
}

}  // namespace

std::vector<double> inspected_elements(const Value& value, bool inlined) {
  return is_inspected(value, inlined) ? value.source.load().to_double() : std::vector<double>{};
}

std::string buffer_reason(const Value& value, const WeightCandidate& candidate, bool multiplied) {
  if (!is_inspected(value, candidate.inlined)) {
    return "";
  }
  const Shape& shape = value.type.shape;
  const int64_t count = num_elements(shape);
  const bool first_row = multiplied && !shape.empty() && shape[0] > 0;
  if (is_mask(elements(value, candidate, 0, first_row ? count / shape[0] : count))) {
    return "holds infinite or huge numbers: a mask";
  }
  return is_position_table(value, candidate) ? "holds sines and cosines of positions" : "";
}

std::vector<std::pair<ValueId, ValueId>> lost_ties(const Graph& graph,
                                                   const std::vector<WeightCandidate>& candidates) {
  std::map<Corners, std::vector<ValueId>> groups;
  std::vector<std::pair<ValueId, ValueId>> pairs;
  for (const WeightCandidate& candidate : candidates) {
    const Value& value = graph.value(candidate.value);
    const Shape& shape = value.type.shape;
    if (value.kind != ValueKind::kParameter || !candidate.inlined || shape.size() != 2 ||
        std::min(shape[0], shape[1]) < 2) {
      continue;
    }
    const Corners key = corners(value, candidate);
    if (key[2] == key[3] && key[2] == key[4] && key[2] == key[5]) {
      continue;  // constant: zeros and ones are equal by chance
    }
    std::vector<ValueId>& alike = groups[key];
    for (const ValueId earlier : alike) {
      const Tensor matrix = value.source.load(), other = graph.value(earlier).source.load();
      if (equal(matrix, other, true) || equal(matrix, other, false)) {
        pairs.emplace_back(candidate.value, earlier);
        break;
      }
    }
    alike.push_back(candidate.value);
  }
  return pairs;
}

}  // namespace trainrt
