// Two ranks are alike when they are on the same stage and their pieces of every tensor have the
// same size. Which tensors are cut, along which dim and into how many units, is the same for all
// ranks of a stage; the sizes follow from the index. The first rank of an axis is never alike to
// the others: where a sum has one whole term, it is the first rank that adds it.
#include "planner/program_memory.h"

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "parallel/micro_batches.h"

namespace trainrt {

struct ProgramMemory::RankClass {
  int rank = 0;
  RankCoordinates at;
  DeviceSpec device;
  const CostModel* cost = nullptr;
  std::vector<int64_t> units;  // of every cut of a tensor, each once
  int share_class = 0;
  bool sums_over_data = false;  // data ranks hold or send different things
  RankParts parts;
  std::shared_ptr<const RankWork> work;
};

// Ranks that share little with the others' graphs: the first of tensor groups, or of data groups,
// and the rest.
struct ProgramMemory::Half {
  Half(const TrainingGraphFactory& factory, const Plan& plan) : partitioner(factory, plan) {}

  Partitioner partitioner;
  std::vector<std::unique_ptr<RankClass>> classes;
};

int64_t ProgramMemory::work(const Plan& plan, int num_nodes) {
  std::set<std::pair<int64_t, int64_t>> shares;
  for (const DataShare& share : plan.shares) {
    shares.emplace(share.num_samples, share.micro_batch_size);
  }
  return static_cast<int64_t>(shares.size()) * (plan.tensor_parallel > 1 ? 2 : 1) *
         (plan.data_parallel > 1 ? 2 : 1) * num_nodes;
}

namespace {

// Both threads begin with the same graphs, which are made once.
TrainingGraphFactory made_once(const TrainingGraphFactory& factory) {
  struct Graphs {
    std::mutex mutex;
    std::map<std::pair<int64_t, bool>, TrainingGraph> made;
  };
  return [factory, graphs = std::make_shared<Graphs>()](int64_t micro_batch, bool accumulate) {
    const std::lock_guard<std::mutex> lock(graphs->mutex);
    const auto key = std::make_pair(micro_batch, accumulate);
    auto found = graphs->made.find(key);
    if (found == graphs->made.end()) {
      found = graphs->made.emplace(key, factory(micro_batch, accumulate)).first;
    }
    return found->second;
  };
}

}  // namespace

ProgramMemory::ProgramMemory(const TrainingGraphFactory& factory,
                             const Plan& plan,
                             std::function<DeviceSpec(int rank)> device,
                             std::function<const CostModel*(int rank)> cost,
                             std::function<void(Program*)> prepare)
    : plan_(plan),
      device_(std::move(device)),
      cost_(std::move(cost)),
      prepare_(std::move(prepare)) {
  const TrainingGraphFactory shared = made_once(factory);
  for (std::unique_ptr<Half>& half : halves_) {
    half = std::make_unique<Half>(shared, plan);
  }
  std::map<std::vector<int64_t>, int> classes;
  for (int d = 0; d < plan.data_parallel; ++d) {
    std::vector<int64_t> samples;
    for (const MicroBatchCut& cut : cut_micro_batches(plan, d)) {
      samples.push_back(cut.num_samples);
    }
    share_class_.push_back(
        classes.emplace(std::move(samples), static_cast<int>(classes.size())).first->second);
  }
}

ProgramMemory::~ProgramMemory() = default;

ProgramMemory::Half& ProgramMemory::half_of(int rank) {
  const RankCoordinates at = rank_coordinates(plan_, rank);
  return *halves_[(plan_.tensor_parallel > 1 ? at.tensor_rank : at.data_rank) == 0 ? 0 : 1];
}

bool ProgramMemory::is_alike(const RankClass& known, int rank) const {
  const Plan& plan = plan_;
  const RankCoordinates at = rank_coordinates(plan, rank);
  if (at.stage != known.at.stage || !(device_(rank) == known.device) ||
      (cost_ && cost_(rank) != known.cost) ||
      (at.tensor_rank == 0) != (known.at.tensor_rank == 0) ||
      share_class_[static_cast<size_t>(at.data_rank)] != known.share_class) {
    return false;
  }
  if (plan.exact_reduction && at.data_rank != known.at.data_rank) {
    return false;  // the tree of sums differs with the logical shards
  }
  if (known.sums_over_data && (at.data_rank == 0) != (known.at.data_rank == 0)) {
    return false;
  }
  return std::all_of(known.units.begin(), known.units.end(), [&](int64_t units) {
    const auto equal = [units](int degree, int a, int b) {
      return shard_range(units, degree, a).size == shard_range(units, degree, b).size;
    };
    return equal(plan.tensor_parallel, at.tensor_rank, known.at.tensor_rank) &&
           equal(plan.data_parallel, at.data_rank, known.at.data_rank);
  });
}

const ProgramMemory::RankClass& ProgramMemory::class_of(int rank) {
  Half& half = half_of(rank);
  const auto found = std::find_if(half.classes.begin(), half.classes.end(), [&](const auto& known) {
    return is_alike(*known, rank);
  });
  if (found != half.classes.end()) {
    return **found;
  }
  auto made = std::make_unique<RankClass>();
  made->rank = rank;
  made->at = rank_coordinates(plan_, rank);
  made->device = device_(rank);
  made->share_class = share_class_[static_cast<size_t>(made->at.data_rank)];
  Program program = half.partitioner.program(rank, made->device);
  if (prepare_) {
    prepare_(&program);
  }
  for (const auto& [name, piece] : program.pieces) {
    for (const PieceCut& cut : piece.cuts) {
      if (std::find(made->units.begin(), made->units.end(), cut.count) == made->units.end()) {
        made->units.push_back(cut.count);
      }
    }
  }
  const auto has_state = [](const ProgramVariant& variant) {
    return !variant.graph.values_of_kind(ValueKind::kState).empty();
  };
  made->sums_over_data = plan_.data_parallel > 1 &&
                         (plan_.zero_stage > 0 ||
                          std::any_of(program.variants.begin(), program.variants.end(), has_state));
  made->parts = {persistent_tensors(program),
                 plan_memory(program),
                 static_cast<int>(program.micro_batches.size())};
  made->cost = cost_ ? cost_(rank) : nullptr;
  made->work = made->cost != nullptr ? rank_work(program, made->parts.plan, *made->cost) : nullptr;
  made->parts.plan.variants.clear();
  half.classes.push_back(std::move(made));
  return *half.classes.back();
}

void ProgramMemory::compile() {
  const auto compile_half = [this](const Half* half) {
    for (int rank = 0; rank < plan_.world_size(); ++rank) {
      if (&half_of(rank) == half) {
        class_of(rank);
      }
    }
  };
  std::future<void> others = std::async(std::launch::async, compile_half, halves_[1].get());
  compile_half(halves_[0].get());
  others.get();
}

std::vector<RankMemory> ProgramMemory::all() {
  compile();
  std::vector<RankMemory> memories;
  for (int rank = 0; rank < plan_.world_size(); ++rank) {
    const RankClass& own = class_of(rank);
    memories.push_back({own.parts.plan.arena_bytes, own.parts.plan.breakdown, own.work});
  }
  return memories;
}

const RankParts& ProgramMemory::parts(int rank) {
  return class_of(rank).parts;
}

}  // namespace trainrt
