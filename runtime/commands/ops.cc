// `trainrt ops`: the operators, and what each offers, read from the registry.
#include <nlohmann/json.hpp>

#include "graph/op_def.h"
#include "runtime/commands/command.h"

namespace trainrt {

namespace {

struct OpRow {
  std::string name;
  bool from_onnx = false;  // has an upgrade of its own; others are made by rewriting
  std::string gradient;    // "yes", "none", "no"
  bool sharding = false;
  bool cpu = false;
  bool cuda = false;
};

std::vector<OpRow> op_rows() {
  std::vector<OpRow> rows;
  for (const std::string& name : op_names()) {
    const OpDef& def = get_op(name);
    OpRow row;
    row.name = name;
    row.from_onnx = find_upgrade("", name) != nullptr || def.upgrade != nullptr;
    row.gradient = def.gradient ? "yes" : def.not_differentiable ? "none" : "no";
    row.sharding = def.sharding != nullptr;
    row.cpu = has_kernel(name, Backend::kCpu);
    row.cuda = has_kernel(name, Backend::kCuda);
    rows.push_back(row);
  }
  return rows;
}

std::string as_text(const std::vector<OpRow>& rows) {
  std::string text = "operator                        onnx  gradient  sharding  cpu  cuda\n";
  const auto mark = [](bool value) { return value ? "yes" : "-"; };
  for (const OpRow& row : rows) {
    std::string line = row.name;
    const auto column = [&](size_t at, const std::string& value) {
      line.resize(std::max(at, line.size() + 1), ' ');
      line += value;
    };
    column(32, mark(row.from_onnx));
    column(38, row.gradient);
    column(48, mark(row.sharding));
    column(58, mark(row.cpu));
    column(63, mark(row.cuda));
    text += line + "\n";
  }
  text += "\nONNX operators rewritten into the above at import:\n ";
  size_t width = 0;
  for (const std::string& name : upgrade_names()) {
    if (find_op(name) != nullptr) {
      continue;
    }
    if (width + name.size() > 90) {
      text += "\n ";
      width = 0;
    }
    text += " " + name;
    width += name.size() + 1;
  }
  return text + "\n";
}

std::string as_json(const std::vector<OpRow>& rows) {
  nlohmann::ordered_json operators = nlohmann::ordered_json::array();
  for (const OpRow& row : rows) {
    operators.push_back({{"name", row.name},
                         {"onnx", row.from_onnx},
                         {"forward", row.cpu || row.cuda},
                         {"gradient", row.gradient},
                         {"sharding", row.sharding},
                         {"cpu", row.cpu},
                         {"cuda", row.cuda}});
  }
  nlohmann::ordered_json rewritten = nlohmann::ordered_json::array();
  for (const std::string& name : upgrade_names()) {
    if (find_op(name) == nullptr) {
      rewritten.push_back(name);
    }
  }
  return nlohmann::ordered_json{{"operators", operators}, {"rewritten", rewritten}}.dump(2) + "\n";
}

const RegisterCommand kOps{{
    .name = "ops",
    .arguments = "",
    .summary = "list operators and what each offers",
    .groups = kFormatOptions | kOutputOptions,
    .min_arguments = 0,
    .max_arguments = 0,
    .run =
        [](const Options& options) {
          const std::vector<OpRow> rows = op_rows();
          write_result(options.format == "json" ? as_json(rows) : as_text(rows), options);
          return 0;
        },
}};

}  // namespace

}  // namespace trainrt
