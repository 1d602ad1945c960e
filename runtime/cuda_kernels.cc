// A kept kernel is a file "<hash of its key>.kernel": the key, whole, and the code. The key names
// all that the code depends on: NVRTC's version and options, the text, and the text of what it
// includes (as a hash).
#include "runtime/cuda_kernels.h"

#include <nvrtc.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "graph/base/cuda_check.h"
#include "graph/base/log.h"
#include "graph/random.h"
#include "runtime/file_bytes.h"

namespace trainrt {

namespace {

nvrtcResult destroy(nvrtcProgram program) {
  return nvrtcDestroyProgram(&program);
}
using NvrtcProgram = cuda::Owned<nvrtcProgram, destroy>;

// For a GPU that is newer than NVRTC: code for the newest that it knows, which the driver
// translates.
struct Target {
  std::string option;
  bool is_final = true;
};

Target target_of(const std::string& isa) {
  int count = 0;
  TRAINRT_CUDA_CHECK(nvrtcGetNumSupportedArchs(&count));
  std::vector<int> known(static_cast<size_t>(count));
  TRAINRT_CUDA_CHECK(nvrtcGetSupportedArchs(known.data()));
  const std::string digits = isa.substr(isa.find('_') + 1);
  int wanted = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), wanted);
  if (std::find(known.begin(), known.end(), wanted) != known.end()) {
    return {concat("--gpu-architecture=sm_", wanted), true};
  }
  std::erase_if(known, [wanted](int arch) { return arch > wanted; });
  TRAINRT_REQUIRE(!known.empty(), kDevice, "NVRTC cannot compile for ", isa);
  return {concat("--gpu-architecture=compute_", *std::max_element(known.begin(), known.end())),
          false};
}

constexpr const char* kOptions[] = {"--std=c++20", "--device-as-default-execution-space"};

std::string log_of(nvrtcProgram program) {
  size_t bytes = 0;
  if (nvrtcGetProgramLogSize(program, &bytes) != NVRTC_SUCCESS || bytes <= 1) {
    return "no reason given";
  }
  std::string log(bytes, '\0');
  static_cast<void>(nvrtcGetProgramLog(program, log.data()));
  return log.c_str();
}

std::string compile(const DeviceSource& source, const Target& target) {
  std::vector<const char*> names, texts;
  for (const DeviceHeader& header : source.headers) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  NvrtcProgram program;
  TRAINRT_CUDA_CHECK(nvrtcCreateProgram(program.put(),
                                        source.text.c_str(),
                                        "kernel.cu",
                                        static_cast<int>(names.size()),
                                        texts.data(),
                                        names.data()));
  const char* options[] = {target.option.c_str(), kOptions[0], kOptions[1]};
  const nvrtcResult status =
      nvrtcCompileProgram(program.get(), static_cast<int>(std::size(options)), options);
  TRAINRT_REQUIRE(status == NVRTC_SUCCESS,
                  kDevice,
                  "nvrtcCompileProgram failed: ",
                  nvrtcGetErrorString(status),
                  ": ",
                  log_of(program.get()),
                  "of\n",
                  source.text);
  size_t bytes = 0;
  std::string code;
  if (target.is_final) {
    TRAINRT_CUDA_CHECK(nvrtcGetCUBINSize(program.get(), &bytes));
    code.resize(bytes);
    TRAINRT_CUDA_CHECK(nvrtcGetCUBIN(program.get(), code.data()));
  } else {
    TRAINRT_CUDA_CHECK(nvrtcGetPTXSize(program.get(), &bytes));
    code.resize(bytes);
    TRAINRT_CUDA_CHECK(nvrtcGetPTX(program.get(), code.data()));
  }
  return code;
}

std::string key_of(const DeviceSource& source, const Target& target) {
  int major = 0, minor = 0;
  TRAINRT_CUDA_CHECK(nvrtcVersion(&major, &minor));
  uint64_t headers = hash_name("");
  for (const DeviceHeader& header : source.headers) {
    headers = hash_name(header.text, hash_name(header.name, headers));
  }
  std::string key = concat("NVRTC ", major, ".", minor, " ", target.option);
  for (const char* option : kOptions) {
    key += concat(" ", option);
  }
  return concat(key, " ", headers, "\n", source.text);
}

// Nothing when the file is not there, or holds the code of another key.
std::string kept_code(const std::string& path, const std::string& key) {
  std::ifstream file(path, std::ios::binary);
  const std::string contents{std::istreambuf_iterator<char>(file), {}};
  return contents.size() > key.size() + 1 && contents.starts_with(key) &&
                 contents[key.size()] == '\0'
             ? contents.substr(key.size() + 1)
             : "";
}

}  // namespace

CompiledKernels::CompiledKernels(std::string isa, std::string folder)
    : isa_(std::move(isa)), folder_(std::move(folder)) {}

std::string CompiledKernels::machine_code(const DeviceSource& source) const {
  const Target target = target_of(isa_);
  if (folder_.empty()) {
    return compile(source, target);
  }
  const std::string key = key_of(source, target);
  const std::string path = concat(folder_, "/", hash_name(key), ".kernel");
  std::string code = kept_code(path, key);
  if (!code.empty()) {
    return code;
  }
  code = compile(source, target);
  try {
    std::filesystem::create_directories(folder_);
    write_file_atomically(path, [&](std::ostream& out) { out << key << '\0' << code; });
  } catch (const std::exception& error) {
    log_warning("compiled kernels are not kept: ", error.what());
  }
  return code;
}

cudaKernel_t CompiledKernels::find(const DeviceSource& source) {
  const std::lock_guard lock(mutex_);
  const auto known = loaded_.find(source.text);
  if (known != loaded_.end()) {
    return known->second.kernel;
  }
  const std::string code = machine_code(source);
  Loaded loaded;
  TRAINRT_CUDA_CHECK(cudaLibraryLoadData(
      loaded.library.put(), code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  TRAINRT_CUDA_CHECK(cudaLibraryGetKernel(&loaded.kernel, loaded.library.get(), kCompiledKernel));
  return loaded_.emplace(source.text, std::move(loaded)).first->second.kernel;
}

}  // namespace trainrt
