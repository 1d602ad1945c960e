// A double of CUDA's libraries for tests: the entry points that the back end uses (those of the
// real headers), computing on the CPU. What it is strict about:
//
//   streams  run nothing until somebody waits, and then in an order that only the program's own
//            events and waits constrain, drawn from a seed: a missing dependency gives a wrong
//            result
//   memory   starts as NaN, has guard pages on both sides, and can be touched by work on a stream
//            alone: a host that reads through a device pointer dies on the spot
//   calls    are refused as the real libraries document, and any one of them can be made to fail
//   waits    that can never end, as on a peer that has gone, end the program and say where each
//            stream stands
//
// Work is done by the thread that waits, under one lock: the double is correct, not fast.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cuda_double {

struct Options {
  int num_devices = 2;
  int compute_major = 9, compute_minor = 0;
  size_t memory_bytes = size_t{1} << 33;  // per device
  size_t communicator_bytes = 0;          // that one of NCCL's takes when it connects ranks
  int driver_version = 13000;
  std::string device_name = {};  // of all; empty: "double 0", "double 1" ...
  size_t cudnn_version = 0;      // 0: that of the header
  uint64_t seed = 0;             // of the orders of streams
  // Work whose stream waits for an event runs without waiting for the event of this number (counted
  // from 1 over all cudaStreamWaitEvent calls). 0: none. For testing that tests notice.
  int64_t drop_wait = 0;
  int hang_seconds = 60;  // a wait that long never ends
};

// Forgets everything and starts anew. Nothing may be alive.
void reset(const Options& options = {});

// The call of this number from now on (counted from 1, over all entry points that can fail) fails
// once. 0: none.
void fail_call(int64_t number);
// Calls since fail_call() or reset(), and the name of the one that was made to fail.
int64_t num_calls();
std::string failed_call();

// From now on cudaEventQuery does not return while this device is current, as when the driver waits
// for a GPU that has broken. -1: it does.
void block_queries(int device);

// What a library's engine does against its user, from now on. Engines are cuDNN's "A0" and "A1" of
// heuristic mode A, "F0" of its fallback; "graph" is any operation graph; cuBLASLt's are "L0",
// "L1"; "device" is what streams say when asked how they are.
enum class Fault {
  kNone,
  kRefuses,    // when its plan, or the graph, is finalized; cuBLASLt does not propose it
  kWantsMore,  // workspace than anybody has
  kFails       // when it is run
};
void set_fault(const std::string& engine, Fault fault);
// What set_fault() said of it last.
Fault fault_of(const std::string& engine);

int64_t num_waits();     // cudaStreamWaitEvent calls since reset()
int64_t num_launches();  // kernels run since reset(), replays of graphs included

int64_t num_copies();  // cudaMemcpyAsync calls since reset()

int64_t num_replays();  // graphs launched since reset()

// cublasLtMatmul calls of this epilogue since reset().
int64_t num_products(unsigned epilogue);

// Those that add a matrix which is not the one they write.
int64_t num_additions();

// cuDNN graphs with such an operation ("conv_forward", "exp", ...) that ran since reset().
int64_t num_graphs(const std::string& operation);

// Execution plans of cuDNN that were finalized since reset(): the real library may compile kernels
// for each.
int64_t num_plans();

// What NVRTC was asked to compile since reset().
struct CompiledText {
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name and text
  std::vector<std::string> options;
};
std::vector<CompiledText> compiled_texts();

// Kernels that were first launched, and their code so loaded, and graphs that were instantiated,
// while their device had communication to do: CUDA may wait for that then, for ever if the peers
// wait in the same way.
int64_t num_loads_under_communication();

// Identifiers of NCCL made since reset().
int64_t num_identifiers();

// Calls of cuDNN and cuBLASLt since reset() with something invalid, as text: whoever asks another
// engine then would hide them.
std::string misuses();

// Bytes of a device's memory that were in use at once, at most, since reset().
int64_t most_bytes_in_use(int device);

// What has been made and not been freed, as text; empty when nothing is.
std::string alive();

// ---- for the double's own files ----------------------------------------------------------------

const Options& options();
// True when the call must fail. Every entry point begins with it.
bool enters_failure(const char* name);
void reset_compiler();
void reset_counts();
void count_alive(const char* kind, int change);
void note_misuse(const char* call);
// Loads a kernel's code if it is the first launch on the stream's device: an error within a
// capture, which is lost by it.
cudaError_t load_kernel(cudaStream_t stream, const std::string& kernel);
void note_load(int device);  // of code or a graph
void count_launch();
void count_replay();
void count_product(unsigned epilogue);
void count_addition();
void count_graph(const std::string& operation);
void count_plan();
void count_identifier();
// Queues work on a stream; it may touch device memory when it runs.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
// Whether [data, data + bytes) lies within one live allocation of device memory.
bool is_device_range(const void* data, size_t bytes);
int current_device();
int device_of(cudaStream_t stream);  // -1: no such stream

}  // namespace cuda_double
