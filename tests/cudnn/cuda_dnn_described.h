// The real cuDNN without a GPU: entry points that pass calls on to the library, with the
// description of a GPU (cuDNN makes plans for a described one from version 9.8 on) wherever the
// back end gives its handle. Running a plan does nothing but count.
#pragma once

#include <cudnn.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace cuda_dnn_described {

struct Gpu {
  const char* name;
  int major, multiprocessors, shared_bytes;  // per block at most
};

// All plans from now on are for this one. Counts start anew.
void describe(const Gpu& gpu);
// An engine, and what it says of itself.
struct Engine {
  std::set<cudnnBackendNumericalNote_t> notes;
  int64_t workspace = 0;

  bool has(cudnnBackendNumericalNote_t note) const { return notes.count(note) > 0; }
  bool is_deterministic() const { return !has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC); }
  bool rounds_fp32() const {
    return has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE) || has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS);
  }
  bool adds_in_16_bits() const { return has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION); }
};
// All that was proposed for the last graph of which engines were asked, and those that ran since
// describe().
const std::vector<Engine>& proposed();
const std::vector<Engine>& run();

// Plans that were run, and calls that the library refused, as text with its reasons.
int64_t num_runs();
std::string refusals();

}  // namespace cuda_dnn_described
