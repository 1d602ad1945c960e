// `trainrt model NAME -o F.onnx`: writes an example model.
#include "models/model.h"

#include <cstdio>

#include "graph/base/error.h"
#include "graph/onnx_export.h"
#include "runtime/commands/command.h"

namespace trainrt {

namespace {

constexpr int64_t kMaxInlineBytes = int64_t{2} << 30;  // Protocol Buffers end there

int64_t weight_bytes(const Graph& graph) {
  int64_t bytes = 0;
  for (const Value& value : graph.values()) {
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kState) {
      bytes += value.type.bytes();
    }
  }
  return bytes;
}

struct Size {
  const char* flag;
  int64_t Options::*option;
  int64_t ModelSpec::*field;
};
constexpr Size kSizes[] = {{"layers", &Options::layers, &ModelSpec::layers},
                           {"hidden", &Options::hidden, &ModelSpec::hidden},
                           {"heads", &Options::heads, &ModelSpec::heads},
                           {"kv-heads", &Options::kv_heads, &ModelSpec::kv_heads},
                           {"ffn", &Options::ffn, &ModelSpec::ffn},
                           {"vocab", &Options::vocab, &ModelSpec::vocab},
                           {"seq", &Options::seq, &ModelSpec::seq},
                           {"classes", &Options::classes, &ModelSpec::classes},
                           {"image", &Options::image, &ModelSpec::image},
                           {"channels", &Options::channels, &ModelSpec::channels}};

// A flag that the family does not read is one that the user expects something of.
void require_size(const std::string& flag, bool known, const ModelSpec& defaults) {
  std::string sizes;
  for (const Size& size : kSizes) {
    sizes += defaults.*size.field > 0 ? concat(sizes.empty() ? "" : " ", "--", size.flag) : "";
  }
  TRAINRT_REQUIRE(known,
                  kInvalidArgument,
                  "a model of family ",
                  defaults.family,
                  " has no --",
                  flag,
                  "; its sizes are ",
                  sizes,
                  defaults.dropout >= 0 ? " --dropout" : "");
}

ModelSpec spec_from(const Options& options) {
  ModelSpec spec = named_model(options.arguments[0]);
  ModelSpec defaults = model_defaults(spec.family);
  defaults.family = spec.family;
  for (const Size& size : kSizes) {
    if (options.*size.option > 0) {
      require_size(size.flag, defaults.*size.field > 0, defaults);
      spec.*size.field = options.*size.option;
    }
  }
  if (options.is_given("dropout")) {
    require_size("dropout", defaults.dropout >= 0, defaults);
    spec.dropout = options.dropout;
  }
  spec.symbolic_seq = options.symbolic_seq;
  spec.seed = static_cast<uint64_t>(options.seed);
  return spec;
}

// "12.3 million" from a million on.
std::string count_text(int64_t count) {
  if (count < 1000000) {
    return concat(count);
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f million", static_cast<double>(count) / 1e6);
  return text;
}

// Indented lines of names.
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kWidth = 90;
  std::string text;
  std::string line = " ";
  for (const std::string& name : names) {
    if (line.size() + 1 + name.size() > kWidth) {
      text += line + "\n";
      line = " ";
    }
    line += " " + name;
  }
  return text + line + "\n";
}

int write_model(const Options& options) {
  TRAINRT_REQUIRE(!options.output_file.empty(),
                  kInvalidArgument,
                  "'trainrt model' wants -o FILE.onnx to write to");
  const Graph graph = build_model(spec_from(options));
  const int64_t bytes = weight_bytes(graph);
  ExportOptions how;
  // A model beyond that size is there to be planned and inspected: its weights are not written.
  how.external_weights = bytes >= kMaxInlineBytes;
  how.write_weights = !how.external_weights;
  how.sequence_symbol = options.symbolic_seq ? "sequence" : "";
  write_onnx(graph, options.output_file, how);
  std::fprintf(stderr,
               "wrote %s: %s, %s parameters%s\n",
               options.output_file.c_str(),
               options.arguments[0].c_str(),
               count_text(bytes / 4).c_str(),
               how.write_weights ? "" : " (weights left out: too large for one file)");
  return 0;
}

const RegisterCommand kModel{{
    .name = "model",
    .arguments = "NAME -o F.onnx",
    .summary = "write an example model",
    .groups = kModelOptions | kOutputOptions,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = write_model,
    .notes =
        [] {
          return "\nNAME is a family:\n" + listed(model_families()) + "or a named size:\n" +
                 listed(model_names());
        },
}};

}  // namespace

}  // namespace trainrt
