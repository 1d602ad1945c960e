// Runs the nodes of a phase on one device: kernels on the lane of computation, communication on its
// own lanes, which wait for each other where they touch the same memory.
//
// Where the device can record work, a run of kernels between two communications is asked for once
// by name and once recorded; from then on the recording is replayed. A recording holds addresses,
// so there is one for each place that a micro-batch in flight may have. Kernels that draw random
// numbers differ in every step and are never recorded; what the host reads ends a run.
#pragma once

#include <string>

#include "runtime/bound_program.h"
#include "runtime/communicated_memory.h"
#include "runtime/device.h"
#include "runtime/rank_communicators.h"
#include "runtime/run_trace.h"
#include "runtime/slowdown.h"

namespace trainrt {

class NodeRunner {
 public:
  NodeRunner(Device& device, RankCommunicators communicators)
      : device_(device),
        communicators_(std::move(communicators)),
        communicated_(device),
        slowdown_(device.speed()) {}

  // Nodes [segment.begin, segment.end) of a phase, whose addresses have been set.
  void run(BoundPhase& phase, Segment& segment, const StepContext& step);

  // Before the first step of ranks that communicate: all kernels of a phase, without communication,
  // whatever they find in memory; then recordings of them, for the addresses that have been set and
  // micro-batches of which one, or none, may be a step's first.
  void run_kernels_once(BoundPhase& phase);
  void record_kernels(BoundPhase& phase, bool may_be_first);

  CommunicatedMemory& communicated() { return communicated_; }

  // Time spent in communication, and waiting for it, since reset_communicating(). CPUs only: a GPU
  // runs behind.
  StepTrace::Clock::duration communicating() const { return communicating_; }
  void reset_communicating() { communicating_ = {}; }
  template <typename Communicate>
  void time_communication(Communicate&& communicate) {
    const StepTrace::Clock::time_point begin = StepTrace::Clock::now();
    communicate();
    communicating_ += StepTrace::Clock::now() - begin;
  }

  // Cells, communication and waits of the steps to come are noted there; null: nowhere.
  void set_trace(StepTrace* trace) { trace_ = trace; }
  template <typename Write>
  void note_feeds(const BoundPhase& phase, Write&& write) {
    const StepTrace::Clock::time_point begin = StepTrace::Clock::now();
    write();
    if (traces_operators() && !phase.feeds.empty()) {
      int64_t bytes = 0;
      for (const BoundTensor& tensor : phase.feeds) {
        bytes += tensor.value->type.bytes();
      }
      trace_->add(
          kFeedKernel, TraceLane::kOperator, begin, StepTrace::Clock::now(), bytes, kFeedKernel);
    }
  }
  void begin_cell(const Cell& cell);
  void end_cell();

 private:
  void run_kernel(BoundNode& node, const StepContext& step);
  void run_communication(BoundNode& node);
  void run_recorded(BoundPhase& phase, Segment& segment, const StepContext& step);
  void run_kernels(BoundPhase& phase, const Segment& segment, const StepContext& step);
  std::vector<const void*> addresses(const BoundPhase& phase,
                                     const Segment& segment,
                                     const StepContext& step) const;
  void throw_if_a_rank_failed() const;
  void await_memory_of(const BoundNode& node);
  StepTrace::Clock::time_point traced_now(Lane lane = Lane::kCommunication);
  // A GPU runs behind the host: its operators are not timed one by one.
  bool traces_operators() const {
    return trace_ != nullptr && device_.context().spec().backend == Backend::kCpu;
  }

  Device& device_;
  RankCommunicators communicators_;
  CommunicatedMemory communicated_;
  Slowdown slowdown_;
  StepTrace::Clock::duration communicating_{0};
  StepTrace* trace_ = nullptr;
  std::string running_cell_;  // when tracing, and since when it computes
  StepTrace::Clock::time_point computing_since_;
};

}  // namespace trainrt
