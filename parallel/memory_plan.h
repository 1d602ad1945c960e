// Program -> the offset of every tensor in one arena, and the peak. Pure: planner and executor call
// the same function, so a predicted peak is the allocated one, to the byte.
//
// The arena is [persistent | dynamic], and the dynamic part begins with the stash slots:
//   persistent  parameters, gradients, optimizer state, model state, constants: live over steps;
//               on GPUs, where messages are copied before they are sent, the room for the copies
//               of those that micro-batches send;
//   stash       what a forward leaves for its backward: one slot per micro-batch in flight, used
//               round robin (micro-batch i of a stage has slot i mod num_slots);
//   transient   everything else of the running phase, overlaid between phases: past the slots, in
//               parts of the micro-batch's own slot that are not live at the time, and, in phases
//               that run once per step (no micro-batch in flight, unless steps go over into each
//               other), over the slots as well.
// With one micro-batch in flight at a time forward and backward are one time line without slots;
// with one micro-batch per step the whole step is.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "parallel/program.h"

namespace trainrt {

// A tensor's life as the allocator sees it: alive in [first_use, last_use] (instants).
struct Lifetime {
  int64_t bytes = 0;
  int first_use = 0;
  int last_use = 0;
};

// Offsets such that no two lifetimes that overlap in time overlap in space; returns the extent.
// Greedy by size, best fit (Pisarchyk & Lee, "Efficient Memory Management for Deep Neural Net
// Inference", arXiv 2001.03288, section 4.3). Every offset is a multiple of kArenaAlignment.
inline constexpr int64_t kArenaAlignment = 64;
int64_t assign_offsets(const std::vector<Lifetime>& lifetimes, std::vector<int64_t>* offsets);

enum class ArenaRegion : uint8_t { kNone, kPersistent, kStash, kTransient, kHost };

struct TensorAddress {
  ArenaRegion region = ArenaRegion::kNone;
  int64_t offset = 0;  // from the region's start; kStash: from the slot's start
  int64_t bytes = 0;
  int local_stage = 0;  // kStash: whose slots
};

struct MemoryBreakdown {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t state = 0;
  int64_t activations = 0;
  int64_t workspace = 0;
  int64_t communication = 0;
  int64_t total() const {
    return parameters + gradients + optimizer + state + activations + workspace + communication;
  }
};

struct VariantMemory {
  std::vector<TensorAddress> values;      // by ValueId of the variant's graph
  std::vector<TensorAddress> workspaces;  // by NodeId; of a Send: the room for its copies
};

struct MemoryPlan {
  int64_t persistent_bytes = 0;
  int64_t message_bytes = 0;        // of those: copies of messages
  std::map<int, int64_t> numbers;   // by pipeline rank: packed ones that it is sent in a step
  std::vector<int64_t> slot_bytes;  // per local virtual stage index, size of one slot
  std::vector<int> num_slots;       // per local virtual stage index
  std::vector<int64_t> slot_base;   // offset of the first slot, per local virtual stage index
  int64_t transient_base = 0;       // = persistent_bytes
  int64_t transient_bytes = 0;      // the dynamic part, slots included
  // The largest of: all slots and what the phases of any virtual stage need beside them (by local
  // virtual stage index), and what the phases need that run once per step.
  std::vector<int64_t> stage_bytes;
  int64_t step_bytes = 0;
  int64_t arena_bytes = 0;    // = peak_bytes: what is allocated
  int64_t host_bytes = 0;     // a second arena in the host's memory: offloaded optimizer state
  MemoryBreakdown breakdown;  // at the instant of the peak; sums to arena_bytes
  std::vector<VariantMemory> variants;

  // Offset from the start of the arena (kHost: the host's) for the micro-batch `micro_batch`
  // (ignored but for kStash).
  int64_t absolute_offset(const TensorAddress& address, int micro_batch) const;
};

MemoryPlan plan_memory(const Program& program);

// The persistent tensors of all variants, each once, in order of first appearance. `bytes`:
// aligned.
struct PersistentTensor {
  std::string key;  // persistent_key()
  ValueKind kind = ValueKind::kParameter;
  int64_t bytes = 0;
};
std::vector<PersistentTensor> persistent_tensors(const Program& program);

}  // namespace trainrt
