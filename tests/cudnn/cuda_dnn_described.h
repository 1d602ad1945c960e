// The real cuDNN without a GPU: entry points that pass calls on to the library, with the
// description of a GPU (cuDNN makes plans for a described one from version 9.8 on) wherever the
// back end gives its handle. Running a plan does nothing but count.
#pragma once

#include <cstdint>
#include <string>

namespace cuda_dnn_described {

struct Gpu {
  const char* name;
  int major, multiprocessors, shared_bytes;  // per block at most
};

// All plans from now on are for this one. Counts start anew.
void describe(const Gpu& gpu);
// Plans that were run, and calls that the library refused, as text with its reasons.
int64_t num_runs();
std::string refusals();

}  // namespace cuda_dnn_described
