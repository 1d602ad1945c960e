// Two ranks are alike when they are on the same stage and their pieces of every tensor have the
// same size. Which tensors are cut, along which dim and into how many units, is the same for all
// ranks of a stage; the sizes follow from the index. The first rank of an axis is never alike to
// the others: where a sum has one whole term, it is the first rank that adds it.
#include "planner/program_memory.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "parallel/micro_batches.h"
#include "planner/parallel_for.h"

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

// Ranks that may be alike: those of other groups never are.
struct ProgramMemory::Group {
  std::vector<int> ranks;
  std::vector<std::unique_ptr<RankClass>> classes;
};

namespace {

// What is computed may be cut where no tensor that is held is: from the parts that a collective
// moves over the tensor group, how many of each `degree` are the larger ones.
std::set<int64_t> larger_parts(const Program& program, int degree) {
  std::set<int64_t> found;
  for (const ProgramVariant& variant : program.variants) {
    for (const Node& node : variant.graph.nodes()) {
      if (degree == 1 || !is_communication(node.op_type) ||
          node.attributes.get_string("group") != "tensor") {
        continue;
      }
      for (const char* name : {"sizes", "concat_sizes"}) {
        const std::vector<int64_t> sizes = node.attributes.get_ints(name, {});
        for (auto first = sizes.begin(); sizes.end() - first >= degree; first += degree) {
          const int64_t larger = std::count(first, first + degree, *first);
          if (larger < degree) {
            found.insert(larger);
          }
        }
      }
    }
  }
  return found;
}

}  // namespace

int64_t ProgramMemory::work(const Plan& plan, int num_nodes) {
  std::set<std::pair<int64_t, int64_t>> shares;
  for (const DataShare& share : plan.shares) {
    shares.emplace(share.num_samples, share.micro_batch_size);
  }
  return static_cast<int64_t>(shares.size()) * (plan.tensor_parallel > 1 ? 2 : 1) *
         (plan.data_parallel > 1 ? 2 : 1) * num_nodes;
}

ProgramMemory::ProgramMemory(const TrainingGraphFactory& factory,
                             const Plan& plan,
                             std::function<DeviceSpec(int rank)> device,
                             std::function<const CostModel*(int rank)> cost,
                             std::function<void(Program*)> prepare)
    : plan_(plan),
      device_(std::move(device)),
      cost_(std::move(cost)),
      prepare_(std::move(prepare)),
      partitioner_(factory, plan) {
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

std::unique_ptr<ProgramMemory::RankClass> ProgramMemory::make_class(int rank) {
  auto made = std::make_unique<RankClass>();
  made->rank = rank;
  made->at = rank_coordinates(plan_, rank);
  made->device = device_(rank);
  made->share_class = share_class_[static_cast<size_t>(made->at.data_rank)];
  Program program = partitioner_.program(rank, made->device);
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
  for (const int64_t larger : larger_parts(program, plan_.tensor_parallel)) {
    made->units.push_back(larger);  // of so many units the same ranks have one
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
  return made;
}

void ProgramMemory::compile() {
  if (!class_of_.empty()) {
    return;
  }
  std::vector<Group> groups;
  std::map<std::tuple<int, bool, int>, size_t> known;
  for (int rank = 0; rank < plan_.world_size(); ++rank) {
    const RankCoordinates at = rank_coordinates(plan_, rank);
    const auto [group, is_new] = known.try_emplace(
        {at.stage, at.tensor_rank == 0, share_class_[static_cast<size_t>(at.data_rank)]},
        groups.size());
    if (is_new) {
      groups.emplace_back();
    }
    groups[group->second].ranks.push_back(rank);
  }
  std::vector<const RankClass*> class_of(static_cast<size_t>(plan_.world_size()), nullptr);
  parallel_for(groups.size(), [&](size_t i, size_t) {
    std::vector<std::unique_ptr<RankClass>>& classes = groups[i].classes;
    for (const int rank : groups[i].ranks) {
      auto own = std::find_if(classes.begin(), classes.end(), [&](const auto& known_class) {
        return is_alike(*known_class, rank);
      });
      if (own == classes.end()) {
        own = classes.insert(own, make_class(rank));
      }
      class_of[static_cast<size_t>(rank)] = own->get();
    }
  });
  for (Group& group : groups) {
    std::move(group.classes.begin(), group.classes.end(), std::back_inserter(classes_));
  }
  class_of_ = std::move(class_of);
}

std::vector<RankMemory> ProgramMemory::all() {
  compile();
  std::vector<RankMemory> memories;
  for (const RankClass* own : class_of_) {
    memories.push_back({own->parts.plan.arena_bytes, own->parts.plan.breakdown, own->work});
  }
  return memories;
}

const RankParts& ProgramMemory::parts(int rank) {
  compile();
  return class_of_[static_cast<size_t>(rank)]->parts;
}

}  // namespace trainrt
