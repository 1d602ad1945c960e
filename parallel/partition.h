// Training graph + Plan -> one Program per rank. Mechanism only: whatever the plan says is carried
// out, or refused with kInfeasiblePlan and the reason; nothing is priced.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "graph/training_graph.h"
#include "parallel/micro_batches.h"
#include "parallel/program.h"

namespace trainrt {

// The training graph at one micro-batch size, with or without gradient accumulators
// (TrainingSpec::accumulate). Names must not depend on either argument. Called once per
// combination.
using TrainingGraphFactory = std::function<TrainingGraph(int64_t micro_batch, bool accumulate)>;
// The same for samples of several lengths.
using ShapedGraphFactory =
    std::function<TrainingGraph(const MicroBatchShape& shape, bool accumulate)>;

// Keeps what the ranks have in common, so that many ranks cost little more than their classes. For
// any thread, if the factory is.
class Partitioner {
 public:
  // Throws kInvalidArgument for a plan that contradicts itself.
  Partitioner(const TrainingGraphFactory& factory, Plan plan);
  // For steps that differ in their micro-batches: programs have a variant for each of `shapes`, the
  // largest first, and step_work() says what a rank does in one step. Throws kUnsupported for plans
  // that need to know a step's micro-batches beforehand.
  Partitioner(ShapedGraphFactory factory, Plan plan, std::vector<MicroBatchShape> shapes);
  ~Partitioner();

  Program program(int rank, const DeviceSpec& device);
  const Plan& plan() const { return plan_; }
  // Whether gradients are accumulated over micro-batches under this plan.
  bool accumulates() const { return accumulates_; }

 private:
  struct Cache;
  struct VariantKey;
  struct Lowered;
  Program empty_program(int rank, const DeviceSpec& device) const;
  Program shaped_program(int rank, const DeviceSpec& device);
  const TrainingGraph& whole(const MicroBatchShape& shape);
  TrainingGraph on_tensor_rank(const MicroBatchShape& shape,
                               int tensor_rank,
                               std::map<std::string, TensorPiece>* pieces);
  const Lowered& lowered(const VariantKey& key, const RankCoordinates& at);
  Lowered lower(const VariantKey& key, int tensor_rank, int data_rank);
  int64_t synced_samples(size_t i) const;
  ProgramVariant variant(const VariantKey& key,
                         const RankCoordinates& at,
                         Backend backend,
                         std::map<std::string, TensorPiece>* pieces,
                         bool is_last = false);

  ShapedGraphFactory factory_;
  Plan plan_;
  std::vector<MicroBatchShape> shapes_;           // empty: the plan's shares say them
  std::vector<std::vector<MicroBatchCut>> cuts_;  // by data rank
  size_t rounds_ = 0;                             // most micro-batches of a data rank
  MicroBatchShape largest_;                       // of all micro-batches
  // Graphs of different sizes may make gradients in different orders, and data ranks that run one
  // and the other beside each other have to sum in the same.
  bool one_size_ = true;
  bool accumulates_ = false;
  bool sums_in_last_ = false;  // over data ranks, within the backward of the last micro-batch
  // Of any size's graph: running averages, which data ranks gather from each other; steps go over
  // into each other.
  std::atomic<bool> has_state_ = false, runs_on_ = false;
  std::unique_ptr<Cache> cache_;
};

// What a rank with these micro-batches does in a step, by a program made for shapes. `rounds`: the
// most micro-batches that a data rank has in the step.
StepWork step_work(const Plan& plan,
                   const Program& program,
                   std::vector<MicroBatch> micro_batches,
                   size_t rounds);

// Programs of all ranks. `devices` has one entry per rank.
std::vector<Program> partition(const TrainingGraphFactory& factory,
                               const Plan& plan,
                               const std::vector<DeviceSpec>& devices);

}  // namespace trainrt
