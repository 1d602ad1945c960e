// A Program tied to one arena: kernels made, tensors resolved to addresses. Private to the
// executor.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/memory_plan.h"
#include "parallel/program.h"
#include "runtime/device.h"

namespace trainrt {

// A tensor that the executor itself writes or reads, before or after a phase.
struct BoundTensor {
  const Value* value = nullptr;
  const TensorAddress* at = nullptr;
  int feed = -1;  // inputs: index into StepFeed::inputs; -1: a runtime input
};

// One pointer of a bound node into a stash slot: patched when its phase starts.
struct StashPatch {
  TensorRef* ref = nullptr;  // null: the workspace
  const TensorAddress* at = nullptr;
};

struct BoundNode {
  const Node* node = nullptr;
  const Node* joined = nullptr;  // whose work the kernel does as well (graph/kernel_pair.h)
  Kernel kernel;                 // empty for communication
  std::vector<TensorRef> inputs;
  std::vector<TensorRef> outputs;
  std::span<std::byte> workspace;
  std::vector<StashPatch> patches;
};

// "Afterwards target takes the contents of source", where the producer did not work in place.
struct BoundUpdate {
  BoundTensor target;
  BoundTensor source;
};

// Nodes [begin, end) of a phase that run one after the other with nothing in between.
struct Segment {
  size_t begin = 0, end = 0;
  bool recordable = false;   // kernels that do the same whenever their addresses are the same
  bool accumulates = false;  // and, then, it is the step's first micro-batch or not
  // By those addresses; null: run once, but not recorded yet.
  std::map<std::vector<const void*>, std::unique_ptr<RecordedWork>> recordings;
};

struct BoundPhase {
  PhaseKind kind = PhaseKind::kForward;
  int virtual_stage = 0;
  std::vector<BoundTensor> feeds;
  std::vector<BoundNode> nodes;
  std::vector<Segment> segments;  // all of them
  std::vector<BoundUpdate> updates;
  // Step results that this phase computes; no value elsewhere.
  BoundTensor loss_sum, item_count, correct, grad_norm;
  size_t grad_norm_node = SIZE_MAX;  // position of the node that makes grad_norm
};

struct BoundVariant {
  std::vector<BoundPhase> phases;
  // The forwards once more, as they run ahead of the step's update: Program::newer_versions.
  std::vector<BoundPhase> ahead;
};

struct BoundProgram {
  std::shared_ptr<const Program> program;
  MemoryPlan memory;
  std::vector<BoundVariant> variants;
  std::map<std::string, BoundTensor> persistent;  // of all variants, by persistent_key()

  // What a cell runs; of the program's own micro-batches, or of a step's work.
  std::vector<BoundPhase*> phases_of(const Cell& cell, const StepWork* work = nullptr);
  void for_each_phase(const std::function<void(BoundPhase&)>& fn);
};

// Makes all kernels, of which persistent tensors are known. `arena` and `host_arena` are the
// addresses of offset 0. Throws kUnsupported for a missing kernel and kInternal for an input that
// `input_names` lacks.
void bind_program(BoundProgram& bound,
                  std::byte* arena,
                  std::byte* host_arena,
                  const std::vector<std::string>& input_names);

// Fills bound.persistent: needs no arena.
void bind_persistent(BoundProgram& bound);

}  // namespace trainrt
