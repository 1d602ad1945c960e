// Parsing of sharding equations. Sizes of factors come from the tensor types of the operator; a
// product dim "(a b)" fixes one unknown factor when the others are known, so equations are read in
// passes until nothing changes.
#include "graph/shard_spec.h"

#include <algorithm>

#include "graph/op_def.h"

namespace trainrt {

namespace {

// One tensor of an equation: a list of dims, each a list of factor names; "..." is {"..."}.
using ParsedDim = std::vector<std::string>;
using ParsedTensor = std::vector<ParsedDim>;

std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  for (;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) {
      return parts;
    }
    begin = end + separator.size();
  }
}

ParsedTensor parse_tensor(std::string_view text) {
  ParsedTensor tensor;
  bool inside = false;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = begin + 1;
    if (text[begin] == '(') {
      inside = true;
      tensor.emplace_back();
    } else if (text[begin] == ')') {
      inside = false;
    } else if (text[begin] != ' ') {
      end = std::min(text.find_first_of(" ()", begin), text.size());
      if (!inside) {
        tensor.emplace_back();
      }
      tensor.back().emplace_back(text.substr(begin, end - begin));
    }
  }
  return tensor;
}

bool is_absent(const ParsedTensor& tensor) {
  return tensor.size() == 1 && tensor[0].size() == 1 && tensor[0][0] == "_";
}

// Replaces "..." by factors "..0", "..1", ... counted from the right, so that tensors of different
// ndim line up; dims of size 1 there carry no factor when they broadcast.
ParsedTensor expand_ellipsis(const ParsedTensor& tensor, const Shape& shape, const Shape& widest) {
  ParsedTensor expanded;
  for (const ParsedDim& dim : tensor) {
    if (dim.size() != 1 || dim[0] != "...") {
      expanded.push_back(dim);
      continue;
    }
    const int count = static_cast<int>(shape.size()) - static_cast<int>(tensor.size()) + 1;
    const int begin = static_cast<int>(expanded.size());
    for (int i = 0; i < count; ++i) {
      const int from_right = count - 1 - i;
      const int widest_dim = static_cast<int>(widest.size()) - 1 - from_right;
      const bool repeats = widest_dim >= 0 && shape[static_cast<size_t>(begin + i)] == 1 &&
                           widest[static_cast<size_t>(widest_dim)] != 1;
      expanded.push_back({repeats ? "1" : ".." + std::to_string(from_right)});
    }
  }
  return expanded;
}

// The leading dims that "..." stands for in the widest tensor of the equation.
Shape widest_ellipsis(const std::vector<ParsedTensor>& tensors, const std::vector<Shape>& shapes) {
  Shape widest;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ParsedTensor& tensor = tensors[i];
    const auto dots = std::find(tensor.begin(), tensor.end(), ParsedDim{"..."});
    if (dots == tensor.end() || shapes[i].size() + 1 < tensor.size()) {
      continue;
    }
    const size_t begin = static_cast<size_t>(dots - tensor.begin());
    const size_t count = shapes[i].size() - tensor.size() + 1;
    const Shape dims(shapes[i].begin() + static_cast<std::ptrdiff_t>(begin),
                     shapes[i].begin() + static_cast<std::ptrdiff_t>(begin + count));
    widest = widest.empty() ? dims : broadcast_shapes(widest, dims);
  }
  return widest;
}

}  // namespace

int ShardingRule::find(std::string_view name) const {
  for (size_t i = 0; i < factors.size(); ++i) {
    if (factors[i].name == name) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

Factors::Factors(const OpContext& op, std::string_view equation) {
  const std::vector<std::string_view> sides = split(equation, "->");
  TRAINRT_CHECK(sides.size() == 2, "equation '", equation, "' needs one ->");
  std::vector<ParsedTensor> tensors;
  std::vector<Shape> shapes;
  const std::vector<std::string_view> input_texts = split(sides[0], ",");
  const std::vector<std::string_view> output_texts = split(sides[1], ",");
  for (size_t i = 0; i < input_texts.size(); ++i) {
    tensors.push_back(parse_tensor(input_texts[i]));
    const bool present = op.has_input(static_cast<int>(i));
    shapes.push_back(present ? op.input_shape(static_cast<int>(i)) : Shape{});
    if (!present) {
      tensors.back() = {{"_"}};
    }
  }
  for (size_t i = 0; i < output_texts.size(); ++i) {
    tensors.push_back(parse_tensor(output_texts[i]));
    const bool present = op.has_output(static_cast<int>(i));
    shapes.push_back(present ? op.output_shape(static_cast<int>(i)) : Shape{});
    if (!present) {
      tensors.back() = {{"_"}};
    }
  }
  const Shape widest = widest_ellipsis(tensors, shapes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    TensorFactors factors;
    if (!is_absent(tensors[i])) {
      const ParsedTensor dims = expand_ellipsis(tensors[i], shapes[i], widest);
      TRAINRT_CHECK(dims.size() == shapes[i].size(),
                    op.node().name,
                    " (",
                    op.node().op_type,
                    "): equation '",
                    equation,
                    "' tensor ",
                    i,
                    " has ",
                    dims.size(),
                    " dims, its shape is ",
                    shape_string(shapes[i]));
      for (size_t d = 0; d < dims.size(); ++d) {
        DimFactors dim;
        for (const std::string& name : dims[d]) {
          if (name == "1") {
            continue;
          }
          int index = rule_.find(name);
          if (index < 0) {
            index = static_cast<int>(rule_.factors.size());
            // 0 marks a size not known yet.
            rule_.factors.push_back({name, dims[d].size() == 1 ? shapes[i][d] : 0});
          } else if (dims[d].size() == 1) {
            rule_.factors[static_cast<size_t>(index)].size = shapes[i][d];
          }
          dim.push_back(index);
        }
        factors.push_back(std::move(dim));
      }
    }
    (i < input_texts.size() ? rule_.inputs : rule_.outputs).push_back(std::move(factors));
  }
  // Products: solve for the one factor of unknown size.
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorFactors& factors =
          i < input_texts.size() ? rule_.inputs[i] : rule_.outputs[i - input_texts.size()];
      for (size_t d = 0; d < factors.size(); ++d) {
        int64_t known = 1;
        int unknown = -1;
        int num_unknown = 0;
        for (const int f : factors[d]) {
          if (rule_.factors[static_cast<size_t>(f)].size == 0) {
            unknown = f;
            ++num_unknown;
          } else {
            known *= rule_.factors[static_cast<size_t>(f)].size;
          }
        }
        if (num_unknown == 1 && known > 0 && shapes[i][d] % known == 0 && shapes[i][d] > 0) {
          rule_.factors[static_cast<size_t>(unknown)].size = shapes[i][d] / known;
          changed = true;
        }
      }
    }
  }
}

Factors Factors::elementwise(const OpContext& op) {
  Factors factors;
  ShardingRule& rule = factors.rule_;
  const Shape& out = op.output_shape(0);
  for (size_t d = 0; d < out.size(); ++d) {
    rule.factors.push_back({"d" + std::to_string(d), out[d]});
  }
  const auto tensor_factors = [&](const Shape& shape) {
    TensorFactors dims(shape.size());
    const size_t offset = out.size() - shape.size();
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == out[d + offset]) {
        dims[d] = {static_cast<int>(d + offset)};
      }
    }
    return dims;
  };
  for (int i = 0; i < op.num_inputs(); ++i) {
    rule.inputs.push_back(op.has_input(i) ? tensor_factors(op.input_shape(i)) : TensorFactors{});
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    rule.outputs.push_back(op.has_output(i) ? tensor_factors(op.output_shape(i)) : TensorFactors{});
  }
  return factors;
}

Factors Factors::whole(const OpContext& op) {
  Factors factors;
  for (int i = 0; i < op.num_inputs(); ++i) {
    factors.rule_.inputs.emplace_back(op.has_input(i) ? op.input_shape(i).size() : 0);
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    factors.rule_.outputs.emplace_back(op.has_output(i) ? op.output_shape(i).size() : 0);
  }
  return factors;
}

namespace {

Factor& named_factor(ShardingRule& rule, std::string_view name) {
  const int index = rule.find(name);
  TRAINRT_CHECK(index >= 0, "no factor '", name, "' in the equation");
  return rule.factors[static_cast<size_t>(index)];
}

}  // namespace

Factors& Factors::size(std::string_view factor, int64_t size) {
  named_factor(rule_, factor).size = size;
  return *this;
}

Factors& Factors::reduction(std::string_view factor, ReductionKind kind) {
  Factor& named = named_factor(rule_, factor);
  named.kind = FactorKind::kReduction;
  named.reduction = kind;
  return *this;
}

Factors& Factors::halo(std::string_view factor) {
  named_factor(rule_, factor).kind = FactorKind::kHalo;
  return *this;
}

Factors& Factors::whole(std::string_view factor) {
  named_factor(rule_, factor).kind = FactorKind::kWhole;
  return *this;
}

Factors& Factors::whole_axis(int axis) {
  for (const int f : rule_.outputs.at(0).at(static_cast<size_t>(axis))) {
    rule_.factors[static_cast<size_t>(f)].kind = FactorKind::kWhole;
  }
  return *this;
}

Factors& Factors::linear(std::vector<std::vector<int>> sets) {
  rule_.linear = std::move(sets);
  return *this;
}

Factors::operator ShardingRule() const {
  for (const Factor& factor : rule_.factors) {
    TRAINRT_CHECK(factor.size > 0 || factor.kind == FactorKind::kWhole,
                  "factor '",
                  factor.name,
                  "' has no known size");
  }
  return rule_;
}

}  // namespace trainrt
