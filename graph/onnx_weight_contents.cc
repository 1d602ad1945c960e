#include "graph/onnx_weight_contents.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

namespace trainrt {

namespace {

// Largest tensor whose contents are looked at to tell what it is.
constexpr int64_t kMaxInspectedElements = 4 << 20;
// An additive mask holds numbers of this size where attention must not look.
constexpr double kMaskMagnitude = 1e4;

bool is_mask(const std::vector<double>& data) {
  return std::any_of(data.begin(), data.end(), [](double element) {
    return !std::isfinite(element) || std::abs(element) >= kMaskMagnitude;
  });
}

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

// Sines and cosines of positions lie in [-1, 1], and position 0 gives zeros and ones alone. Names
// decide between them and weights that happen to start so, but no weight starts with a row that
// alternates 0, 1, 0, 1 ... as the interleaved table of the first Transformer does.
bool is_position_table(const Value& value, const std::vector<double>& data) {
  if (data.empty() ||
      !std::all_of(data.begin(), data.end(), [](double x) { return std::abs(x) <= 1; })) {
    return false;
  }
  Shape dims;
  for (const int64_t dim : value.type.shape) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  if (contains(value.name, "inv_freq")) {
    return data[0] == 1 && std::is_sorted(data.rbegin(), data.rend());
  }
  if (dims.size() < 2 ||
      std::all_of(data.begin(), data.end(), [&](double x) { return x == data[0]; })) {
    return false;
  }
  const auto width = static_cast<size_t>(dims.back());
  const auto first_row_is = [&](auto&& expected) {
    for (size_t i = 0; i < width; ++i) {
      if (data[i] != expected(i)) {
        return false;
      }
    }
    return true;
  };
  if (width >= 4 && first_row_is([](size_t i) { return i % 2 == 0 ? 0.0 : 1.0; })) {
    return true;
  }
  return (contains(value.name, "cos") && first_row_is([](size_t) { return 1.0; })) ||
         (contains(value.name, "sin") && first_row_is([](size_t) { return 0.0; }));
}

double element(const Tensor& matrix, int64_t row, int64_t column) {
  double result = 0;
  const int64_t at = row * matrix.shape()[1] + column;
  dispatch_all(matrix.dtype(), [&](auto tag) {
    result = static_cast<double>(static_cast<float>(matrix.data<decltype(tag)>()[at]));
  });
  return result;
}

// Equal for a matrix and its transpose, and cheap.
using Corners = std::array<double, 6>;
Corners corners(const Tensor& m) {
  const int64_t rows = m.shape()[0];
  const int64_t columns = m.shape()[1];
  const double a = element(m, 0, columns - 1);
  const double b = element(m, rows - 1, 0);
  return {static_cast<double>(std::min(rows, columns)),
          static_cast<double>(std::max(rows, columns)),
          element(m, 0, 0),
          element(m, rows - 1, columns - 1),
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

}  // namespace

std::vector<double> inspected_elements(const Value& value, bool inlined) {
  if (!inlined || num_elements(value.type.shape) > kMaxInspectedElements) {
    return {};
  }
  return value.source.load().to_double();
}

std::string buffer_reason(const Value& value, bool inlined) {
  const std::vector<double> data = inspected_elements(value, inlined);
  if (is_mask(data)) {
    return "holds infinite or huge numbers: a mask";
  }
  return is_position_table(value, data) ? "holds sines and cosines of positions" : "";
}

std::vector<std::pair<ValueId, ValueId>> lost_ties(const Graph& graph,
                                                   const std::vector<WeightCandidate>& candidates) {
  std::map<Corners, std::vector<std::pair<ValueId, Tensor>>> groups;
  std::vector<std::pair<ValueId, ValueId>> pairs;
  for (const WeightCandidate& candidate : candidates) {
    const Value& value = graph.value(candidate.value);
    const Shape& shape = value.type.shape;
    if (value.kind != ValueKind::kParameter || !candidate.inlined || shape.size() != 2 ||
        std::min(shape[0], shape[1]) < 2) {
      continue;
    }
    const Tensor matrix = value.source.load();
    const Corners key = corners(matrix);
    if (key[2] == key[3] && key[2] == key[4] && key[2] == key[5]) {
      continue;  // constant: zeros and ones are equal by chance
    }
    for (const auto& [earlier, other] : groups[key]) {
      if (equal(matrix, other, true) || equal(matrix, other, false)) {
        pairs.emplace_back(candidate.value, earlier);
        break;
      }
    }
    groups[key].emplace_back(candidate.value, matrix);
  }
  return pairs;
}

}  // namespace trainrt
