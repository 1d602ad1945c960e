// `trainrt doctor`: what this machine offers, and the names it can be planned for with.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "parallel/cluster_file.h"
#include "runtime/commands/command.h"
#include "runtime/machine.h"
#include "runtime/version.h"

namespace trainrt {

namespace {

std::string gibibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  return text;
}

std::string as_text(const Machine& machine) {
  std::string text = "trainrt     " + version() + "\n";
  text += "cpu         " + machine.cpu + "\n";
  text +=
      "cores       " + std::to_string(machine.cores) + " usable, vector unit " + machine.isa + "\n";
  text += "memory      " + gibibytes(machine.memory_bytes) + ", " +
          gibibytes(machine.available_bytes) + " available\n";
  text += "gpu         ";
  text += machine.driver_library.empty()
              ? "no CUDA driver here: runs use the CPU; plans for GPUs work\n"
              : "CUDA driver found\n";
  text += "devices     cpu, cpu:N (N ranks that share this machine)\n";
  text += "clusters    for --cluster, each with :N hosts:\n ";
  size_t width = 0;
  for (const std::string& name : preset_names()) {
    if (width + name.size() > 90) {
      text += "\n ";
      width = 0;
    }
    text += " " + name;
    width += name.size() + 1;
  }
  return text + "\n";
}

std::string as_json(const Machine& machine) {
  const nlohmann::ordered_json json = {
      {"version", version()},
      {"cpu", machine.cpu},
      {"isa", machine.isa},
      {"cores", machine.cores},
      {"memory_bytes", machine.memory_bytes},
      {"available_bytes", machine.available_bytes},
      {"cuda_driver", !machine.driver_library.empty()},
      {"presets", preset_names()},
  };
  return json.dump(2) + "\n";
}

const RegisterCommand kDoctor{{
    .name = "doctor",
    .arguments = "",
    .summary = "what this machine offers",
    .groups = kFormatOptions | kOutputOptions,
    .min_arguments = 0,
    .max_arguments = 0,
    .run =
        [](const Options& options) {
          const Machine machine = describe_machine();
          write_result(options.format == "json" ? as_json(machine) : as_text(machine), options);
          return 0;
        },
}};

}  // namespace

}  // namespace trainrt
