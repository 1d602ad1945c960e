#include "runtime/load_cuda.h"

#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "graph/base/log.h"
#include "parallel/message_lanes.h"
#include "runtime/launcher.h"
#include "runtime/module_interface.h"

namespace trainrt {

namespace {

constexpr const char* kEntry = "trainrt_cuda_module";
constexpr const char* kInterface = "trainrt_cuda_interface";
constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kModule = "trainrt_cuda.so";

using Entry = const CudaModule* (*)();

std::string dl_reason() {
  const char* reason = dlerror();
  return reason != nullptr ? reason : "unknown reason";
}

// Beside the program, else one folder up, where tests find it.
std::filesystem::path module_path() {
  const std::filesystem::path folder =
      std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::filesystem::path beside = folder / kModule, above = folder.parent_path() / kModule;
  return std::filesystem::exists(beside) || !std::filesystem::exists(above) ? beside : above;
}

// What to do about a module that is not opened: a library that it asks for lacks, or the file is no
// module of ours.
std::string advice(const std::string& reason) {
  return reason.find("cannot open shared object file") != std::string::npos
             ? "Install the CUDA libraries it was built with (cuBLAS, NVRTC, cuDNN 9, NCCL 2), or "
               "name their folder in LD_LIBRARY_PATH"
             : "The file is damaged or of another build: take the one that was built together with "
               "this program";
}

Entry entry_of(void* module, const std::string& path) {
  void* const interface = dlsym(module, kInterface);
  void* const entry = dlsym(module, kEntry);
  TRAINRT_REQUIRE(interface != nullptr && entry != nullptr &&
                      reinterpret_cast<uint64_t (*)()>(interface)() == kModuleInterface &&
                      reinterpret_cast<Entry>(entry)() != nullptr,
                  kDevice,
                  path,
                  entry == nullptr
                      ? " is no CUDA back end of trainrt: it has no '"
                      : " is the CUDA back end of another trainrt than this program: of other '",
                  entry == nullptr ? kEntry : kInterface,
                  "'. Take the one that was built together with this program");
  return reinterpret_cast<Entry>(entry);
}

Entry find_entry() {
  keep_lanes_apart();
  // A program that the back end is linked into (its tests) has the entry itself.
  if (void* own = dlsym(RTLD_DEFAULT, kEntry)) {
    return reinterpret_cast<Entry>(own);
  }
  TRAINRT_REQUIRE(dlopen(kDriver, RTLD_NOW | RTLD_LOCAL) != nullptr,
                  kDevice,
                  "no NVIDIA driver on this machine: ",
                  dl_reason(),
                  ". Install the driver, or run with --devices cpu; 'trainrt doctor' says what is "
                  "there");
  const std::filesystem::path path = module_path();
  TRAINRT_REQUIRE(std::filesystem::exists(path),
                  kDevice,
                  "this trainrt was built without CUDA: ",
                  path.string(),
                  " is not there. Build with -DTRAINRT_CUDA=ON and a CUDA toolkit, or run with "
                  "--devices cpu");
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const std::string reason = module == nullptr ? dl_reason() : "";
  TRAINRT_REQUIRE(module != nullptr,
                  kDevice,
                  "the CUDA back end cannot be loaded: ",
                  reason,
                  ". ",
                  advice(reason));
  return entry_of(module, path.string());
}

}  // namespace

// Of the lanes that share a connection each waits for the others' heads, for ever if peers wait in
// the same way. The order that a single connection makes, which other programs count on
// (Megatron-LM wants 1), is of no use here: events order what must be.
void keep_lanes_apart() {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
  const std::string given = process_environment()(kVariable).value_or("");
  int connections = 0;
  std::from_chars(given.data(), given.data() + given.size(), connections);
  if (connections >= kMostLanes) {
    return;
  }
  if (!given.empty()) {
    log_warning(kVariable,
                " is '",
                given,
                "' in the environment and ",
                kMostLanes,
                " here: with fewer, a message that waits for its peer can hold up all work");
  }
  static_cast<void>(setenv(kVariable, std::to_string(kMostLanes).c_str(), 1));
}

// NVSwitches add (NVLS) in an order that differs from call to call: NVIDIA/nccl#1497, #2360.
void keep_sums_in_order() {
  constexpr const char* kVariable = "NCCL_NVLS_ENABLE";
  const std::string given = process_environment()(kVariable).value_or("0");
  if (given != "0") {
    log_warning(kVariable, " is '", given, "' in the environment and 0 here, for --deterministic");
  }
  static_cast<void>(setenv(kVariable, "0", 1));
}

const CudaModule& cuda_module() {
  static const Entry entry = find_entry();
  return *entry();
}

bool names_cuda(const std::string& devices) {
  return devices == "cuda" || devices.rfind("cuda:", 0) == 0;
}

std::vector<int> cuda_device_indices(const std::string& devices) {
  std::vector<int> indices;
  if (devices == "cuda") {
    for (size_t i = 0; i < cuda_module().devices().size(); ++i) {
      indices.push_back(static_cast<int>(i));
    }
    return indices;
  }
  std::istringstream list(devices.substr(std::string("cuda:").size()) + ",");
  std::set<int> seen;
  for (std::string word; std::getline(list, word, ',');) {
    int index = -1;
    const auto [end, status] = std::from_chars(word.data(), word.data() + word.size(), index);
    TRAINRT_REQUIRE(status == std::errc() && end == word.data() + word.size() && index >= 0,
                    kInvalidArgument,
                    "--devices '",
                    devices,
                    "'; wanted cpu, cpu:N, cuda or cuda:0,1");
    TRAINRT_REQUIRE(seen.insert(index).second,
                    kInvalidArgument,
                    "--devices '",
                    devices,
                    "' names ",
                    index,
                    " twice");
    indices.push_back(index);
  }
  TRAINRT_REQUIRE(!indices.empty(),
                  kInvalidArgument,
                  "--devices '",
                  devices,
                  "'; wanted cpu, cpu:N, cuda or cuda:0,1");
  const size_t count = cuda_module().devices().size();
  for (const int index : indices) {
    TRAINRT_REQUIRE(index < static_cast<int>(count),
                    kDevice,
                    "--devices '",
                    devices,
                    "': there is no cuda:",
                    index,
                    "; this machine has ",
                    count,
                    count == 1 ? " GPU (cuda:0)" : " GPUs");
  }
  return indices;
}

}  // namespace trainrt
