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
  int64_t Options::*option;
  int64_t ModelSpec::*field;
};
constexpr Size kSizes[] = {{&Options::layers, &ModelSpec::layers},
                           {&Options::hidden, &ModelSpec::hidden},
                           {&Options::heads, &ModelSpec::heads},
                           {&Options::kv_heads, &ModelSpec::kv_heads},
                           {&Options::ffn, &ModelSpec::ffn},
                           {&Options::vocab, &ModelSpec::vocab},
                           {&Options::seq, &ModelSpec::seq},
                           {&Options::classes, &ModelSpec::classes},
                           {&Options::image, &ModelSpec::image},
                           {&Options::channels, &ModelSpec::channels}};

ModelSpec spec_from(const Options& options) {
  ModelSpec spec = named_model(options.arguments[0]);
  for (const Size& size : kSizes) {
    if (options.*size.option > 0) {
      spec.*size.field = options.*size.option;
    }
  }
  if (options.is_given("dropout")) {
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
