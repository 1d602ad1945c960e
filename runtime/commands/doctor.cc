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
  if (machine.gpus.empty()) {
    text += "gpu         none: " + machine.no_gpu_reason + "\n            plans for GPUs work\n";
  }
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    const CudaDeviceInfo& gpu = machine.gpus[i];
    text += concat("gpu         cuda:",
                   i,
                   ": ",
                   gpu.name,
                   ", ",
                   gpu.isa,
                   ", ",
                   gibibytes(gpu.memory_bytes),
                   "\n");
  }
  if (!machine.gpus.empty()) {
    text += "cuda        " + machine.cuda_versions + "\n";
  }
  text += "devices     cpu, cpu:N (N ranks that share this machine)";
  text += machine.gpus.empty() ? "\n" : ", cuda, cuda:0,1\n";
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
  nlohmann::ordered_json gpus = nlohmann::ordered_json::array();
  for (const CudaDeviceInfo& gpu : machine.gpus) {
    gpus.push_back({{"name", gpu.name}, {"isa", gpu.isa}, {"memory_bytes", gpu.memory_bytes}});
  }
  const nlohmann::ordered_json json = {
      {"version", version()},
      {"cpu", machine.cpu},
      {"isa", machine.isa},
      {"cores", machine.cores},
      {"memory_bytes", machine.memory_bytes},
      {"available_bytes", machine.available_bytes},
      {"gpus", gpus},
      {"cuda_versions", machine.cuda_versions},
      {"no_gpu_reason", machine.no_gpu_reason},
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
