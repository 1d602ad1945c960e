// `trainrt inspect`: what is in the file, and what would be trained. Weights are not read.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "graph/onnx_import.h"
#include "graph/onnx_symbols.h"
#include "graph/printer.h"
#include "graph/training_graph.h"
#include "runtime/commands/command.h"
#include "runtime/frozen_norms.h"
#include "runtime/option_checks.h"
#include "runtime/training_job.h"

namespace trainrt {

namespace {

using Json = nlohmann::ordered_json;

std::string dims_text(const ModelInput& input) {
  std::string text;
  for (const Dim& dim : input.dims) {
    text += (text.empty() ? "" : ", ") + (dim.size >= 0 ? std::to_string(dim.size) : dim.symbol);
  }
  return concat(dtype_name(input.dtype), "[", text, "]");
}

struct Report {
  std::vector<TensorReport> tensors;
  std::vector<UnsupportedOp> unsupported;
  std::map<std::string, int> operators;  // after import, by operator
  std::vector<LossSpec> losses;          // that the float outputs can carry, the default first
  std::vector<std::string> frozen;       // BatchNormalization with fixed statistics
  std::map<std::string, int64_t> dims;   // sizes chosen only to describe the model
  std::string cannot_bind;               // why there is no graph
};

// What `--loss auto` makes of each float output, without labels in the data; first of the one that
// it takes by itself.
std::vector<LossSpec> loss_candidates(const Graph& graph) {
  std::vector<LossSpec> losses;
  const auto add = [&](const std::string& output) {
    LossSpec wanted;
    wanted.output = output;
    try {
      LossSpec loss = resolve_loss(graph, wanted, nullptr);
      if (losses.empty() || losses[0].output != loss.output) {
        losses.push_back(std::move(loss));
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) {
        throw;  // what cannot carry a loss is no candidate
      }
    }
  };
  add("");
  for (const ValueId id : graph.outputs()) {
    if (is_floating(graph.value(id).type.dtype)) {
      add(graph.value(id).name);
    }
  }
  return losses;
}

std::string loss_text(const LossSpec& loss) {
  if (loss.kind == "output") {
    return concat("'", loss.output, "' itself");
  }
  return concat(loss.kind,
                " of '",
                loss.output,
                "' against ",
                loss.next_token ? std::string("the next token") : concat("'", loss.labels, "'"));
}

void describe(const OnnxModel& model, BindOptions bind, Report& report) {
  report.dims = dims_to_describe(model, bind);
  bind.dims.insert(report.dims.begin(), report.dims.end());
  report.unsupported = model.unsupported(bind);
  report.tensors = model.tensors(bind);
  if (report.unsupported.empty()) {
    const Graph graph = model.bind(bind);
    for (const Node& node : graph.nodes()) {
      ++report.operators[node.op_type];
    }
    report.frozen = frozen_norms(graph);
    if (!model.has_training_info()) {
      report.losses = loss_candidates(graph);
    }
  }
}

// The batch that the model's own dims are fixed to, if any.
std::optional<int64_t> own_batch(const OnnxModel& model) {
  for (const ModelInput& input : model.inputs()) {
    if (input.batch_axis >= 0 && input.dims[static_cast<size_t>(input.batch_axis)].size > 0) {
      return input.dims[static_cast<size_t>(input.batch_axis)].size;
    }
  }
  return std::nullopt;
}

// Rethrows `error` where only --trainable and --freeze are to blame: they match nothing, and a
// description without them would not be what was asked for.
void require_patterns(const OnnxModel& model, BindOptions bind, const Error& error) {
  if (bind.trainable.empty() && bind.freeze.empty()) {
    return;
  }
  bind.trainable.clear();
  bind.freeze.clear();
  try {
    Report report;
    describe(model, bind, report);
  } catch (const Error&) {
    return;
  }
  throw Error(error);
}

Report make_report(const OnnxModel& model, const Options& options) {
  Report report;
  BindOptions bind = bind_options(options, true);
  bind.batch = options.batch_size;
  try {
    describe(model, bind, report);
  } catch (const Error& error) {
    require_patterns(model, bind, error);
    // A dim that needs --bind, say: the rest of the file can still be described.
    report.cannot_bind = error.what();
    const std::optional<int64_t> batch = own_batch(model);
    if (batch && *batch != bind.batch) {
      bind.batch = *batch;
      try {
        describe(model, bind, report);
      } catch (const Error&) {
        report.tensors.clear();  // what was said first says it all
      }
    }
  }
  return report;
}

std::string as_text(const OnnxModel& model, const Report& report) {
  std::string text = concat("file       ",
                            model.path(),
                            "\nproducer   ",
                            model.producer().empty() ? "-" : model.producer(),
                            ", IR ",
                            model.ir_version(),
                            ", opset ",
                            model.opset(),
                            "\nhash       ",
                            model.hash(),
                            "\n");
  if (model.has_training_info()) {
    text += "training   the file says how it is trained (training_info)\n";
  }
  for (const ModelInput& input : model.inputs()) {
    text += concat("input      ",
                   input.name,
                   " ",
                   dims_text(input),
                   input.batch_axis >= 0 ? concat(", samples along axis ", input.batch_axis)
                                         : ", no batch axis",
                   "\n");
  }
  if (!report.dims.empty()) {
    text += "described  at";
    for (const auto& [symbol, size] : report.dims) {
      text += concat(" ", symbol, "=", size);
    }
    text += "; run takes the sizes from the data or from --bind\n";
  }
  for (const std::string& output : model.outputs()) {
    text += "output     " + output + "\n";
  }
  for (const LossSpec& loss : report.losses) {
    text += concat(
        "loss       ", loss_text(loss), &loss == &report.losses[0] ? "" : " (--output)", "\n");
  }
  int64_t trained = 0;
  std::map<std::string, int> roles;
  for (const TensorReport& tensor : report.tensors) {
    ++roles[tensor.role];
    trained += tensor.role == "parameter" ? num_elements(tensor.type.shape) : 0;
  }
  text += concat("trained    ", trained, " elements in ", roles["parameter"], " tensors\n");
  for (const TensorReport& tensor : report.tensors) {
    text += concat("  ",
                   tensor.role,
                   " ",
                   tensor.name,
                   " ",
                   type_string(tensor.type),
                   tensor.why.empty() ? "" : ": " + tensor.why,
                   "\n");
  }
  if (!report.frozen.empty()) {
    text += concat("frozen     ", frozen_norms_text(report.frozen), "\n");
  }
  if (!report.operators.empty()) {
    text += "operators ";
    for (const auto& [name, count] : report.operators) {
      text += concat(" ", name, " x", count);
    }
    text += "\n";
  }
  for (const UnsupportedOp& op : report.unsupported) {
    text += concat("UNSUPPORTED ",
                   op.op_type,
                   " (opset ",
                   op.opset,
                   "), ",
                   op.nodes.size(),
                   " nodes, first '",
                   op.nodes.empty() ? "" : op.nodes[0],
                   "': ",
                   op.why,
                   "\n");
  }
  if (!report.cannot_bind.empty()) {
    text += "cannot be run as it is: " + report.cannot_bind + "\n";
  }
  return text;
}

std::string as_json(const OnnxModel& model, const Report& report) {
  Json json = {{"file", model.path()},
               {"producer", model.producer()},
               {"ir_version", model.ir_version()},
               {"opset", model.opset()},
               {"hash", model.hash()},
               {"training_info", model.has_training_info()},
               {"inputs", Json::array()},
               {"outputs", model.outputs()},
               {"losses", Json::array()},
               {"tensors", Json::array()},
               {"frozen_batch_norms", report.frozen},
               {"operators", report.operators},
               {"unsupported", Json::array()}};
  for (const ModelInput& input : model.inputs()) {
    Json dims = Json::array();
    for (const Dim& dim : input.dims) {
      dims.push_back(dim.size >= 0 ? Json(dim.size) : Json(dim.symbol));
    }
    json["inputs"].push_back({{"name", input.name},
                              {"dtype", dtype_name(input.dtype)},
                              {"dims", dims},
                              {"batch_axis", input.batch_axis}});
  }
  if (!report.dims.empty()) {
    json["described_at"] = report.dims;
  }
  for (const LossSpec& loss : report.losses) {
    json["losses"].push_back({{"kind", loss.kind},
                              {"output", loss.output},
                              {"labels", loss.labels},
                              {"next_token", loss.next_token}});
  }
  for (const TensorReport& tensor : report.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", dtype_name(tensor.type.dtype)},
                               {"shape", tensor.type.shape},
                               {"role", tensor.role},
                               {"why", tensor.why}});
  }
  for (const UnsupportedOp& op : report.unsupported) {
    json["unsupported"].push_back(
        {{"operator", op.op_type}, {"opset", op.opset}, {"nodes", op.nodes}, {"why", op.why}});
  }
  if (!report.cannot_bind.empty()) {
    json["cannot_bind"] = report.cannot_bind;
  }
  return json.dump(2) + "\n";
}

// Flags that it takes with the others, so that a configuration file serves all commands, but does
// not read.
void refuse_unread(const Options& options) {
  for (const std::string& flag : options.flags) {
    const OptionDef* option = find_option(flag);
    const bool shared =
        option != nullptr && (option->groups & (kDataOptions | kTrainingOptions)) != 0;
    const bool read = flag == "bind" || flag == "batch-axis" || flag == "batch-size" ||
                      flag == "trainable" || flag == "freeze";
    TRAINRT_REQUIRE(!shared || read,
                    kInvalidArgument,
                    "--",
                    flag,
                    " has no effect with 'trainrt inspect', which looks at the model alone");
  }
}

const RegisterCommand kInspect{{
    .name = "inspect",
    .arguments = "MODEL.onnx",
    .summary = "what is in the file, and what would be trained",
    .groups = kDataOptions | kTrainingOptions | kFormatOptions | kOutputOptions,
    .min_arguments = 1,
    .max_arguments = 1,
    .run =
        [](const Options& options) {
          refuse_unread(options);
          const OnnxModel model = OnnxModel::load(options.arguments[0]);
          check_weight_files(options, model);
          check_bound_dims(model, bind_options(options, true));
          const Report report = make_report(model, options);
          write_result(options.format == "json" ? as_json(model, report) : as_text(model, report),
                       options);
          return 0;
        },
}};

}  // namespace

}  // namespace trainrt
