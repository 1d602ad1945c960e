// Runs one rank's Programs. All memory is one arena, laid out by the memory plan and allocated
// once; kernels are made once. A step does nothing but walk the program's cells.
//
// Several programs (a short last batch, shape buckets) share the arena: persistent tensors keep
// their addresses, so a step may run any of them. Used from one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/memory_plan.h"
#include "parallel/program.h"
#include "runtime/device.h"
#include "runtime/rank_communicators.h"
#include "runtime/run_trace.h"

namespace trainrt {

// What one step is fed with.
struct StepFeed {
  uint64_t seed = 0;
  int64_t step = 0;    // from 0; keys the random numbers
  int64_t update = 0;  // of the optimizer, from 0: steps that were not skipped
  double learning_rate = 0;
  double loss_scale = 1;  // fp16: the seed is multiplied, the gradients divided by it
  // A loss or gradient that is not finite is reported in StepResult::skipped rather than thrown;
  // the program's updates then have left everything as it was, running statistics too.
  bool skip_overflow = false;
  bool trains = true;  // else the step only evaluates, and says so where it fails
  // What to do, of a program made for shapes; null: the program's own cells.
  const StepWork* work = nullptr;
  // [micro-batch of the step][index into the executor's input names].
  const std::vector<std::vector<Tensor>>* inputs = nullptr;
  // They lie in memory of Device::allocate_host and stay as they are until the step has ended, so
  // the device fetches them itself.
  bool fetches_inputs = false;
  // The step after this one, of the same program, which runs on: its first forwards run among this
  // one's last backwards, and it has to come next. Null: nothing is in flight when this step ends.
  const StepFeed* next = nullptr;
};

// Sums over the whole step, equal on every rank; of a program that runs on (Program::runs_on) only
// rank 0 has them, since telling the others would make them wait for it.
struct StepResult {
  double loss_sum = 0;
  double item_count = 0;
  double correct = 0;
  bool has_correct = false;
  double grad_norm = 0;
  bool has_grad_norm = false;
  bool skipped = false;  // nothing was updated: loss or gradient was not finite

  double loss() const { return item_count > 0 ? loss_sum / item_count : 0; }
};

class Executor {
 public:
  // `input_names`: the order of StepFeed::inputs.
  Executor(Device& device, RankCommunicators communicators, std::vector<std::string> input_names);
  ~Executor();

  // Returns the program's number. All are added before load().
  int add_program(std::shared_ptr<const Program> program, MemoryPlan memory);

  // Allocates the arena, fills persistent tensors with zeros and constants with their data. Throws
  // kInfeasiblePlan or kOutOfMemory.
  void load();

  // Goes on with other programs, between steps: contents of persistent tensors are kept, by name.
  // Throws as load() does.
  void replace_programs(const std::vector<std::shared_ptr<const Program>>& programs,
                        const std::vector<MemoryPlan>& memories);

  // Throws kNonFinite, before any parameter is changed, when the loss or the gradient is not
  // finite, unless StepFeed::skip_overflow. Of a program that runs on rank 0 throws, when it ends
  // the step as the last rank: what others have made of it by then is for nobody to see.
  StepResult run_step(int program, const StepFeed& feed);

  // Cells, communication and waits of the steps to come are noted there; null: nowhere.
  void set_trace(StepTrace* trace);

  // Contents of a persistent tensor on this rank (its shard), between steps.
  Tensor read(const std::string& name) const;
  // The same where communication has failed, too: what it was before the step that failed, if that
  // has not changed it.
  Tensor read_after_failure(const std::string& name) const;
  void write(const std::string& name, const Tensor& tensor);

  // What training has to remember: parameters, state and optimizer state, as the first program has
  // them.
  std::vector<const Value*> persistent_values() const;

  // Of the last step, without communication and waiting for it. CPUs only: a GPU runs behind.
  double compute_seconds() const;

  int64_t arena_bytes() const;
  int64_t host_bytes() const;  // beside it, in the host's memory: offloaded optimizer state

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trainrt
