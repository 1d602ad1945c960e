// The tensors of one program variant as the allocator sees them: buffers with a life on a time
// line. Private to the memory plan.
//
// 1. Time lines. Phases that share a micro-batch follow each other on one time line (C, F, B, W of
// a
//    virtual stage); phases of the step (G, R, U) form another. With one micro-batch per step all
//    phases form one.
// 2. Buffers. Values that share storage form one buffer: an update in place, an input overwritten
// by
//    the output when nobody reads it afterwards, a view and what it looks at. A buffer lives from
//    the first of its values to the last. On GPUs an activation may run within the product before
//    it (graph/kernel_pair.h): its result then lives from there on.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graph/op_def.h"
#include "parallel/program.h"

namespace trainrt {

bool is_step_phase(PhaseKind kind);  // runs once per step

enum class Category : uint8_t { kActivation, kGradient, kWorkspace, kCommunication };

struct Buffer {
  int64_t bytes = 0;
  int first = -1, last = -1;              // instants of its time line
  int first_phase = -1, last_phase = -1;  // positions of phases on the time line
  int timeline = -1;
  bool fixed = false;      // persistent: has an address already
  bool step_wide = false;  // read on several time lines: lives as long as persistent ones
  int64_t fixed_offset = 0;
  bool on_host = false;      // fixed: in the host's arena
  bool accumulator = false;  // fixed: of a gradient
  Category category = Category::kActivation;
};

// Phases of one variant that are planned together, in order of execution.
struct TimeLine {
  std::vector<const Phase*> phases;
  int local_stage = -1;  // -1: once per step
  bool stash = false;    // other phases run between its phases
  int num_instants = 0;
};

// Where a persistent value lies: in the device's arena, or in the host's.
struct PersistentAddress {
  int64_t offset = 0;
  bool on_host = false;
};

std::vector<TimeLine> make_timelines(const Program& program, const ProgramVariant& variant);

// Storage of one variant: value -> buffer, and the buffers' lives.
class BufferPlan {
 public:
  BufferPlan(const ProgramVariant& variant,
             const DeviceSpec& device,
             std::vector<TimeLine>* lines,
             const std::unordered_map<std::string, PersistentAddress>& persistent);

  int find(int buffer) const {
    while (parent_[static_cast<size_t>(buffer)] != buffer) {
      buffer = parent_[static_cast<size_t>(buffer)];
    }
    return buffer;
  }
  int buffer_of(ValueId id) const {
    const int buffer = buffer_of_[static_cast<size_t>(id)];
    return buffer < 0 ? -1 : find(buffer);
  }
  Buffer& buffer(int i) { return buffers_[static_cast<size_t>(i)]; }
  int num_buffers() const { return static_cast<int>(buffers_.size()); }
  bool is_root(int i) const { return parent_[static_cast<size_t>(i)] == i; }
  const std::vector<std::pair<NodeId, int>>& workspaces() const { return workspaces_; }

 private:
  void add(ValueId id, const Buffer& buffer) {
    buffer_of_[static_cast<size_t>(id)] = add_buffer(buffer);
  }
  int add_buffer(const Buffer& buffer) {
    parent_.push_back(static_cast<int>(buffers_.size()));
    buffers_.push_back(buffer);
    return parent_.back();
  }

  // `from` becomes part of `into`.
  void merge(int into, int from) {
    Buffer &a = buffer(into), &b = buffer(from);
    parent_[static_cast<size_t>(from)] = into;
    a.bytes = std::max(a.bytes, b.bytes);
    if (b.first >= 0 && !a.fixed) {
      if (a.first < 0 || b.first < a.first) {
        a.first = b.first;
        a.first_phase = b.first_phase;
      }
      if (b.last > a.last) {
        a.last = b.last;
        a.last_phase = b.last_phase;
      }
    }
    a.category = std::max(a.category, b.category);
  }

  void touch(ValueId id, int instant, int phase, int line) {
    Buffer& touched = buffer(find(buffer_of_[static_cast<size_t>(id)]));
    if (touched.fixed) {
      return;
    }
    if (touched.first < 0) {
      touched.first = instant;
      touched.first_phase = phase;
      touched.timeline = line;
    }
    touched.step_wide = touched.step_wide || touched.timeline != line;
    touched.last = std::max(touched.last, instant);
    touched.last_phase = std::max(touched.last_phase, phase);
  }

  void walk(const DeviceSpec& device, TimeLine& line, int index);
  void leave_room_for_pair(const std::vector<NodeId>& nodes, size_t at);
  void share_storage(const TimeLine& line);
  bool ends_accumulator(const Node& node, ValueId input) const;
  bool try_inplace(const Node& node, const Inplace& alias, int instant);

  const Graph& graph_;
  std::vector<int> buffer_of_;
  std::vector<int> num_readers_;  // by value
  std::vector<Buffer> buffers_;
  std::vector<int> parent_;
  std::unordered_map<ValueId, ValueId> alias_of_;   // new value of a state -> its target
  std::unordered_map<NodeId, int> joined_input_;    // by node: see leave_room_for_pair()
  std::vector<std::pair<NodeId, int>> workspaces_;  // node, buffer
};

}  // namespace trainrt
