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

ModelSpec spec_from(const Options& options) {
  ModelSpec spec = named_model(options.arguments[0]);
  const auto take = [](int64_t value, int64_t& field) {
    if (value > 0) {
      field = value;
    }
  };
  take(options.layers, spec.layers);
  take(options.hidden, spec.hidden);
  take(options.heads, spec.heads);
  take(options.kv_heads, spec.kv_heads);
  take(options.ffn, spec.ffn);
  take(options.vocab, spec.vocab);
  take(options.seq, spec.seq);
  take(options.classes, spec.classes);
  take(options.image, spec.image);
  take(options.channels, spec.channels);
  if (options.is_given("dropout")) {
    spec.dropout = options.dropout;
  }
  spec.symbolic_seq = options.symbolic_seq;
  spec.seed = static_cast<uint64_t>(options.seed);
  return spec;
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
               "wrote %s: %s, %.1f million parameters%s\n",
               options.output_file.c_str(),
               options.arguments[0].c_str(),
               static_cast<double>(bytes) / 4e6,
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
}};

}  // namespace

}  // namespace trainrt
