// `trainrt model NAME -o F.onnx`: writes an example model.
#include "models/model.h"

#include <cstdio>
#include <filesystem>

#include "graph/base/error.h"
#include "graph/onnx_export.h"
#include "graph/output_path.h"
#include "runtime/commands/command.h"
#include "runtime/metrics.h"
#include "runtime/signals.h"

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

// Told before hours of writing, not after.
void require_room(const std::string& file, int64_t bytes) {
  const OutputPath place = resolve_output(file, concat("'", file, "'"));
  if (place.is_stream) {
    return;  // writing will tell
  }
  const std::filesystem::path folder = std::filesystem::path(place.path).parent_path();
  std::error_code error;
  const std::filesystem::space_info space =
      std::filesystem::space(folder.empty() ? "." : folder, error);
  TRAINRT_REQUIRE(error || static_cast<uintmax_t>(bytes) <= space.available,
                  kIo,
                  "the weights take ",
                  bytes_text(bytes),
                  ", and where '",
                  file,
                  "' would lie ",
                  bytes_text(static_cast<int64_t>(space.available)),
                  " are free: free some, write elsewhere, or leave out --external-weights (plan "
                  "and inspect do without weights)");
}

// Thrown between two tensors.
struct Stopped {};

// Weights of any size in a file of their own: each tensor is drawn when its turn comes. A signal
// ends that so that no half file is left.
void write_weights_beside(Graph& graph, const std::string& path, const ExportOptions& how) {
  const int64_t bytes = weight_bytes(graph);
  const std::string file = path + ".weights";
  require_room(file, bytes);
  std::fprintf(stderr, "writing %s of weights to %s\n", bytes_text(bytes).c_str(), file.c_str());
  for (const ValueKind kind : {ValueKind::kParameter, ValueKind::kState}) {
    for (const ValueId id : graph.values_of_kind(kind)) {
      graph.value(id).source.load = [load = graph.value(id).source.load] {
        if (stop_signal() != 0) {
          throw Stopped();
        }
        return load();
      };
    }
  }
  catch_stop_signals();
  defer_stop_signals();
  write_onnx(graph, path, how);
}

int write_model(const Options& options) {
  TRAINRT_REQUIRE(!options.output_file.empty(),
                  kInvalidArgument,
                  "'trainrt model' wants -o FILE.onnx to write to");
  Graph graph = build_model(spec_from(options));
  const int64_t bytes = weight_bytes(graph);
  const std::string& path = options.output_file;
  ExportOptions how;
  how.sequence_symbol = options.symbolic_seq ? "sequence" : "";
  how.external_weights = options.external_weights || bytes >= kMaxInlineBytes;
  // A model beyond that size is mostly there to be planned and inspected.
  how.write_weights = options.external_weights || !how.external_weights;
  if (options.external_weights) {
    try {
      write_weights_beside(graph, path, how);
    } catch (const Stopped&) {
      std::fprintf(stderr, "stopped by a signal: nothing is written\n");
      return 128 + stop_signal();
    }
  } else {
    write_onnx(graph, path, how);
  }
  const std::string left_out =
      concat(" (weights left out: ", bytes_text(bytes), "; --external-weights writes them)");
  std::fprintf(stderr,
               "wrote %s: %s, %s parameters%s\n",
               path.c_str(),
               options.arguments[0].c_str(),
               count_text(bytes / 4).c_str(),
               how.write_weights ? "" : left_out.c_str());
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
