// ONNX LSTM, GRU and RNN (opsets 7 to 22), rewritten to one Recurrent per direction and ordinary
// nodes around it. `layout` = 1 (opset 14) has the batch before the steps.
#include "graph/upgrade.h"
#include "ops/recurrent.h"

namespace trainrt {

namespace {

class RecurrentUpgrade {
 public:
  explicit RecurrentUpgrade(UpgradeContext& u) : u_(u) {
    lstm_ = u.op_type() == "LSTM";
    gates_ = lstm_ ? 4 : u.op_type() == "GRU" ? 3 : 1;
    batch_first_ = u.attributes().get_int("layout", 0) != 0;
    direction_ = u.attributes().get_string("direction", "forward");
    num_directions_ = direction_ == "bidirectional" ? 2 : 1;
    x_ = batch_first_ ? u.transpose(u.input(0), {1, 0, 2}) : u.input(0);
    if (u.ndim(x_) != 3 || u.ndim(u.input(1)) != 3 || u.ndim(u.input(2)) != 3 ||
        u.shape(u.input(1))[0] != num_directions_) {
      u.fail(concat("x, w and r must be [steps, batch, size], [",
                    num_directions_,
                    ", gates * hidden, size] and [..., hidden], got ",
                    shape_string(u.shape(x_)),
                    ", ",
                    shape_string(u.shape(u.input(1))),
                    ", ",
                    shape_string(u.shape(u.input(2)))));
    }
    hidden_ = u.shape(u.input(2)).back();
    const int64_t wanted = u.attributes().get_int("hidden_size", hidden_);
    TRAINRT_REQUIRE(wanted == hidden_ && hidden_ > 0,
                    kInvalidModel,
                    "hidden_size is ",
                    wanted,
                    ", but r is ",
                    shape_string(u.shape(u.input(2))),
                    "; wanted its last dim, at least 1");
  }

  void run() {
    std::vector<std::vector<ValueId>> results;
    for (int d = 0; d < num_directions_; ++d) {
      results.push_back(one_direction(d));
    }
    const Shape shape = u_.shape(x_);
    const auto stacked = [&](size_t output, const Shape& each, int64_t axis) {
      std::vector<ValueId> parts;
      for (const std::vector<ValueId>& result : results) {
        parts.push_back(u_.reshape(result[output], each));
      }
      return parts.size() == 1 ? parts[0] : u_.op("Concat", parts, {{"axis", axis}});
    };
    const ValueId y = stacked(0, {shape[0], 1, shape[1], hidden_}, 1);
    u_.set_output(0, batch_first_ ? u_.transpose(y, {2, 0, 1, 3}) : y);
    for (int output = 1; output < (lstm_ ? 3 : 2); ++output) {
      const ValueId last = stacked(static_cast<size_t>(output), {1, shape[1], hidden_}, 0);
      u_.set_output(output, batch_first_ ? u_.transpose(last, {1, 0, 2}) : last);
    }
  }

 private:
  // Slice `d` of the first axis, without it; parts of the rest by begin and end.
  ValueId of_direction(int input, int d) {
    const ValueId value = u_.input(input);
    const Shape shape = u_.shape(value);
    TRAINRT_REQUIRE(!shape.empty(),
                    kInvalidModel,
                    "input ",
                    input,
                    " is ",
                    shape_string(shape),
                    "; wanted [directions, ...]");
    return u_.reshape(slice(value, 0, d, d + 1), {shape.begin() + 1, shape.end()});
  }

  ValueId slice(ValueId value, int64_t axis, int64_t begin, int64_t end) {
    const Shape& shape = u_.shape(value);
    if (axis >= static_cast<int64_t>(shape.size()) || end > shape[static_cast<size_t>(axis)]) {
      u_.fail(concat("an operand of shape ", shape_string(shape), " is too small"));
    }
    if (begin == 0 && end == shape[static_cast<size_t>(axis)]) {
      return value;
    }
    return u_.op("Slice",
                 {value},
                 {{"starts", Shape{begin}},
                  {"ends", Shape{end}},
                  {"axes", Shape{axis}},
                  {"steps", Shape{1}}});
  }

  // Initial states are [directions, batch, hidden], or [batch, directions, hidden].
  ValueId initial_state(int input, int d) {
    const Shape wanted = {u_.shape(x_)[1], hidden_};
    if (!u_.has_input(input)) {
      return u_.fill(0, {u_.dtype(x_), wanted});
    }
    return u_.reshape(slice(u_.input(input), batch_first_ ? 1 : 0, d, d + 1), wanted);
  }

  // ONNX lists alphas and betas only for the functions that have them, in order.
  Attributes attributes_of(int d) {
    const size_t per_direction = lstm_ ? 3 : gates_ == 3 ? 2 : 1;
    const std::vector<std::string> defaults =
        lstm_         ? std::vector<std::string>{"Sigmoid", "Tanh", "Tanh"}
        : gates_ == 3 ? std::vector<std::string>{"Sigmoid", "Tanh"}
                      : std::vector<std::string>{"Tanh"};
    const std::vector<std::string> given = u_.attributes().get_strings("activations", {});
    const std::vector<double> given_alpha = u_.attributes().get_floats("activation_alpha", {});
    const std::vector<double> given_beta = u_.attributes().get_floats("activation_beta", {});
    if (!given.empty() && given.size() != per_direction * static_cast<size_t>(num_directions_)) {
      u_.fail(concat("activations has ",
                     given.size(),
                     " entries, wanted ",
                     per_direction * static_cast<size_t>(num_directions_)));
    }
    std::vector<std::string> names;
    std::vector<double> alphas, betas;
    size_t next_alpha = 0, next_beta = 0;
    for (size_t i = 0; i < per_direction * static_cast<size_t>(d + 1); ++i) {
      const std::string& name = given.empty() ? defaults[i % per_direction] : given[i];
      double alpha, beta;
      recurrent::default_parameters(name, alpha, beta);
      if (alpha != 0 && next_alpha < given_alpha.size()) {
        alpha = given_alpha[next_alpha++];
      }
      if (alpha != 0 && next_beta < given_beta.size()) {
        beta = given_beta[next_beta++];
      }
      if (i >= per_direction * static_cast<size_t>(d)) {
        names.push_back(name);
        alphas.push_back(alpha);
        betas.push_back(beta);
      }
    }
    const bool reverse = direction_ == "reverse" || d == 1;
    return {{"cell",
             std::string(lstm_         ? "lstm"
                         : gates_ == 3 ? "gru"
                                       : "rnn")},
            {"activations", names},
            {"alphas", alphas},
            {"betas", betas},
            {"reverse", int64_t{reverse}},
            {"clip", u_.attributes().get_float("clip", 0)},
            {"linear_before_reset", u_.attributes().get_int("linear_before_reset", 0)},
            {"input_forget", u_.attributes().get_int("input_forget", 0)}};
  }

  std::vector<ValueId> one_direction(int d) {
    const int64_t width = gates_ * hidden_;
    ValueId xproj = u_.matmul(x_, of_direction(1, d), false, true);
    ValueId rb = kNoValue;
    if (u_.has_input(3)) {
      const ValueId biases = of_direction(3, d);
      xproj = u_.add(xproj, slice(biases, 0, 0, width));
      rb = slice(biases, 0, width, 2 * width);
    } else {
      rb = u_.fill(0, {u_.dtype(x_), {width}});
    }
    std::vector<ValueId> inputs = {xproj, of_direction(2, d), rb, initial_state(5, d)};
    inputs.push_back(lstm_ ? initial_state(6, d) : kNoValue);
    inputs.push_back(lstm_ && u_.has_input(7) ? of_direction(7, d) : kNoValue);
    inputs.push_back(u_.has_input(4) ? u_.input(4) : kNoValue);
    return u_.node("Recurrent",
                   inputs,
                   attributes_of(d),
                   num_directions_ == 1 ? u_.node_name() : concat(u_.node_name(), "/", d));
  }

  UpgradeContext& u_;
  bool lstm_ = false, batch_first_ = false;
  int64_t gates_ = 1, hidden_ = 0;
  std::string direction_;
  int num_directions_ = 1;
  ValueId x_ = kNoValue;
};

void upgrade(UpgradeContext& u) {
  RecurrentUpgrade(u).run();
}

const RegisterUpgrade kLstm{"LSTM", upgrade};
const RegisterUpgrade kGru{"GRU", upgrade};
const RegisterUpgrade kRnn{"RNN", upgrade};

}  // namespace

}  // namespace trainrt
