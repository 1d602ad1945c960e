// NVRTC and what loads its results. The double compiles nothing: it checks that all that is
// included is there, and keeps the text. Kernels run as their header's host form (ops/launch.cuh).
#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/cuda_memory.h"
#include "tests/cuda_double/cuda_streams.h"

using namespace cuda_double;

struct _nvrtcProgram {
  CompiledText text;
  std::string log;
  bool is_compiled = false;
};

struct CUlib_st {};

namespace {

constexpr int kArchitectures[] = {75, 80, 86, 90, 100};
constexpr const char kCode[] = "code of the double";

std::vector<CompiledText>& texts() {
  static std::vector<CompiledText> all;
  return all;
}

// The first name that is included and not given; "": there is none.
std::string missing_header(const CompiledText& text) {
  std::set<std::string> seen;
  std::vector<std::string> open = {text.text};
  while (!open.empty()) {
    std::istringstream lines(open.back());
    open.pop_back();
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("#include ", 0) != 0) {
        continue;
      }
      const std::string name = line.substr(10, line.size() - 11);
      const auto at = std::find_if(text.headers.begin(),
                                   text.headers.end(),
                                   [&](const auto& header) { return header.first == name; });
      if (at == text.headers.end()) {
        return name;
      }
      if (seen.insert(name).second) {
        open.push_back(at->second);
      }
    }
  }
  return "";
}

}  // namespace

namespace cuda_double {

void reset_compiler() {
  texts().clear();
}

std::vector<CompiledText> compiled_texts() {
  const Lock lock;
  return texts();
}

}  // namespace cuda_double

#define DOUBLE_ENTRY(code)        \
  const Lock lock;                \
  if (enters_failure(__func__)) { \
    return code;                  \
  }

extern "C" {

const char* nvrtcGetErrorString(nvrtcResult code) {
  return code == NVRTC_ERROR_COMPILATION ? "compilation" : "made to fail, or refused";
}
nvrtcResult nvrtcVersion(int* major, int* minor) {
  DOUBLE_ENTRY(NVRTC_ERROR_INTERNAL_ERROR)
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  DOUBLE_ENTRY(NVRTC_ERROR_INTERNAL_ERROR)
  *count = static_cast<int>(std::size(kArchitectures));
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  DOUBLE_ENTRY(NVRTC_ERROR_INTERNAL_ERROR)
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), archs);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram* program,
                               const char* text,
                               const char*,
                               int num_headers,
                               const char* const* headers,
                               const char* const* names) {
  DOUBLE_ENTRY(NVRTC_ERROR_OUT_OF_MEMORY)
  *program = new _nvrtcProgram;
  (*program)->text.text = text;
  for (int i = 0; i < num_headers; ++i) {
    (*program)->text.headers.emplace_back(names[i], headers[i]);
  }
  count_alive("programs of NVRTC", 1);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  const Lock lock;
  delete *program;
  *program = nullptr;
  count_alive("programs of NVRTC", -1);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int num_options, const char* const* options) {
  DOUBLE_ENTRY(NVRTC_ERROR_COMPILATION)
  program->text.options.assign(options, options + num_options);
  const std::string missing = missing_header(program->text);
  if (!missing.empty()) {
    program->log = "cannot open source file \"" + missing + "\"";
    return NVRTC_ERROR_COMPILATION;
  }
  program->is_compiled = true;
  texts().push_back(program->text);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
  DOUBLE_ENTRY(NVRTC_ERROR_INVALID_PROGRAM)
  *bytes = program->log.size() + 1;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  DOUBLE_ENTRY(NVRTC_ERROR_INVALID_PROGRAM)
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) {
  DOUBLE_ENTRY(NVRTC_ERROR_INVALID_PROGRAM)
  *bytes = sizeof(kCode);
  return program->is_compiled ? NVRTC_SUCCESS : NVRTC_ERROR_INVALID_PROGRAM;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* code) {
  DOUBLE_ENTRY(NVRTC_ERROR_INVALID_PROGRAM)
  std::memcpy(code, kCode, sizeof(kCode));
  return program->is_compiled ? NVRTC_SUCCESS : NVRTC_ERROR_INVALID_PROGRAM;
}
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
  return nvrtcGetCUBINSize(program, bytes);
}
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* code) {
  return nvrtcGetCUBIN(program, code);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library,
                                const void* code,
                                cudaJitOption*,
                                void**,
                                unsigned,
                                cudaLibraryOption*,
                                void**,
                                unsigned) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  if (breaks_capture()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (std::memcmp(code, kCode, sizeof(kCode)) != 0) {
    return cudaErrorInvalidKernelImage;
  }
  *library = new CUlib_st;
  count_alive("libraries", 1);
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char*) {
  DOUBLE_ENTRY(cudaErrorSymbolNotFound)
  *kernel = reinterpret_cast<cudaKernel_t>(library);
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
  const Lock lock;
  delete library;
  count_alive("libraries", -1);
  return cudaSuccess;
}

}  // extern "C"
