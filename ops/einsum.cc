// ONNX Einsum, rewritten at import: operands are joined two at a time, each pair by one MatMul over
// [batch, rows, inner] . [batch, inner, columns], with transposes and reshapes around it. Indices
// of a joined pair that nobody needs later are summed first. Repeated indices within one operand
// (diagonals) are not supported.
#include <algorithm>
#include <map>

#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

// An operand: its value and one letter per dim.
struct Term {
  ValueId value = kNoValue;
  std::string indices;
};

constexpr char kFirstDot = '\x01';  // letters of the dims that "..." stands for, right-aligned

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  return parts;
}

bool contains(const std::string& text, char c) {
  return text.find(c) != std::string::npos;
}

// Replaces "..." by `count` letters, the last of which is always the same.
std::string expand_dots(std::string text, int count) {
  const size_t at = text.find("...");
  if (at == std::string::npos) {
    return text;
  }
  std::string letters;
  for (int i = count; i-- > 0;) {
    letters += static_cast<char>(kFirstDot + i);
  }
  return text.replace(at, 3, letters);
}

class Einsum {
 public:
  explicit Einsum(UpgradeContext& u) : u_(u) { parse(); }

  ValueId run() {
    Term result = reduce(terms_[0], needed_after(0));
    for (size_t i = 1; i < terms_.size(); ++i) {
      result = join(result, reduce(terms_[i], needed_after(i) + result.indices), needed_after(i));
    }
    return arrange(result, output_);
  }

 private:
  void parse() {
    const std::string equation = u_.attributes().get_string("equation");
    const size_t arrow = equation.find("->");
    const std::vector<std::string> inputs = split(equation.substr(0, arrow), ',');
    if (static_cast<int>(inputs.size()) != u_.num_inputs()) {
      u_.fail(concat("equation '",
                     equation,
                     "' has ",
                     inputs.size(),
                     " operands, the node ",
                     u_.num_inputs()));
    }
    int most_dots = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const ValueId value = u_.input(static_cast<int>(i));
      const int dots =
          contains(inputs[i], '.') ? u_.ndim(value) - static_cast<int>(inputs[i].size()) + 3 : 0;
      most_dots = std::max(most_dots, dots);
      terms_.push_back({value, expand_dots(inputs[i], std::max(0, dots))});
      check_term(terms_.back(), equation);
    }
    output_ = arrow == std::string::npos
                  ? implicit_output(most_dots)
                  : expand_dots(split(equation.substr(arrow + 2), ',')[0], most_dots);
    for (const char c : output_) {
      if (sizes_.count(c) == 0) {
        u_.fail(concat("equation '", equation, "': no operand has the output's index '", c, "'"));
      }
    }
  }

  void check_term(const Term& term, const std::string& equation) {
    const Shape shape = u_.shape(term.value);
    if (term.indices.size() != shape.size()) {
      u_.fail(concat(
          "equation '", equation, "' does not fit an operand of shape ", shape_string(shape)));
    }
    for (size_t d = 0; d < shape.size(); ++d) {
      if (term.indices.find(term.indices[d]) != d) {
        u_.fail("repeated indices within one operand (a diagonal) are not supported");
      }
      int64_t& size = sizes_.emplace(term.indices[d], 1).first->second;
      if (size != 1 && shape[d] != 1 && size != shape[d]) {
        u_.fail(concat("equation '", equation, "': an index has sizes ", size, " and ", shape[d]));
      }
      size = std::max(size, shape[d]);
    }
  }

  // "..." first, then the letters that occur once, in alphabetical order.
  std::string implicit_output(int dots) const {
    std::map<char, int> count;
    for (const Term& term : terms_) {
      for (const char c : term.indices) {
        ++count[c];
      }
    }
    std::string output = expand_dots("...", dots);
    for (const auto& [letter, times] : count) {
      if (times == 1 && !contains(output, letter)) {
        output += letter;
      }
    }
    return output;
  }

  // Letters that the output or an operand after `i` has.
  std::string needed_after(size_t i) const {
    std::string needed = output_;
    for (size_t k = i + 1; k < terms_.size(); ++k) {
      needed += terms_[k].indices;
    }
    return needed;
  }

  // Sums the indices that are not in `needed`.
  Term reduce(const Term& term, const std::string& needed) {
    std::vector<int64_t> axes;
    std::string kept;
    for (size_t d = 0; d < term.indices.size(); ++d) {
      if (contains(needed, term.indices[d])) {
        kept += term.indices[d];
      } else {
        axes.push_back(static_cast<int64_t>(d));
      }
    }
    return axes.empty() ? term : Term{u_.reduce_sum(term.value, axes, false), kept};
  }

  // The value with its dims in the order of `indices`, which are all of them.
  ValueId arrange(const Term& term, const std::string& indices) {
    std::vector<int64_t> permutation;
    std::string present;
    for (const char c : indices) {
      if (contains(term.indices, c)) {
        permutation.push_back(static_cast<int64_t>(term.indices.find(c)));
        present += c;
      }
    }
    ValueId value = term.value;
    if (present != term.indices) {
      value = u_.transpose(value, permutation);
    }
    return present == indices ? value : u_.reshape(value, shape_of(indices));
  }

  Shape shape_of(const std::string& indices) const {
    Shape shape;
    for (const char c : indices) {
      shape.push_back(sizes_.at(c));
    }
    return shape;
  }

  // As [batch, rows, columns], repeating dims of size 1 that the other operand has larger.
  ValueId as_matrices(const Term& term,
                      const std::string& batch,
                      const std::string& rows,
                      const std::string& columns) {
    const std::string all = batch + rows + columns;
    const ValueId value = u_.expand(arrange(term, all), shape_of(all));
    return u_.reshape(value,
                      {num_elements(shape_of(batch)),
                       num_elements(shape_of(rows)),
                       num_elements(shape_of(columns))});
  }

  Term join(const Term& a, const Term& b, const std::string& needed) {
    std::string batch, rows, columns, inner;
    for (const char c : a.indices) {
      (!contains(b.indices, c) ? rows : contains(needed, c) ? batch : inner) += c;
    }
    for (const char c : b.indices) {
      if (!contains(a.indices, c)) {
        columns += c;
      }
    }
    const ValueId product =
        u_.matmul(as_matrices(a, batch, rows, inner), as_matrices(b, batch, inner, columns));
    const std::string indices = batch + rows + columns;
    return {u_.reshape(product, shape_of(indices)), indices};
  }

  UpgradeContext& u_;
  std::vector<Term> terms_;
  std::string output_;
  std::map<char, int64_t> sizes_;
};

const RegisterUpgrade kEinsum{"Einsum",
                              [](UpgradeContext& u) { u.set_output(0, Einsum(u).run()); }};

}  // namespace

}  // namespace trainrt
