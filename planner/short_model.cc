// Blocks are told apart on the forward graph. A segment of them is cut out by letting the readers
// of what its last block hands on read what its first block is handed: of equal type, since the
// pattern repeats. The training graph of what is left has one more block or so behind the others,
// for the loss; the chain of the whole is put together from it, with the names of the whole.
#include "planner/short_model.h"

#include <algorithm>
#include <map>
#include <set>

#include "graph/passes/pass.h"
#include "parallel/made_once.h"

namespace trainrt {

namespace {

constexpr int kLongestPattern = 16;

// How often the `size` classes from `at` follow each other there.
int repetitions(const std::vector<int>& classes, int at, int end, int size) {
  int same = 0;  // classes that equal those `size` places before
  for (int i = at + size;
       i < end && classes[static_cast<size_t>(i)] == classes[static_cast<size_t>(i - size)];
       ++i) {
    ++same;
  }
  return 1 + same / size;
}

}  // namespace

ForwardGraph remembered(ForwardGraph forward) {
  using Known = MadeOnce<int64_t, std::shared_ptr<const Graph>>;
  return [forward = std::move(forward), known = std::make_shared<Known>()](int64_t micro_batch) {
    return known->at(micro_batch, [&] { return forward(micro_batch); });
  };
}

std::vector<int> without_repetitions(const std::vector<int>& classes,
                                     int first,
                                     int end,
                                     int times) {
  std::vector<int> kept;
  for (int at = first; at < end;) {
    int size = 1, most = 1;
    for (int wanted = 1; wanted <= kLongestPattern && at + 2 * wanted <= end; ++wanted) {
      const int found = repetitions(classes, at, end, wanted);
      if (found > times && found * wanted > most * size) {
        size = wanted;
        most = found;
      }
    }
    for (int i = at; i < at + size * std::min(most, times); ++i) {
      kept.push_back(i);
    }
    at += size * most;
  }
  return kept;
}

namespace {

bool is_kept(const std::vector<int>& kept, size_t block) {
  return std::binary_search(kept.begin(), kept.end(), static_cast<int>(block));
}

}  // namespace

std::optional<Graph> keep_blocks(const Graph& forward,
                                 const BlockList& list,
                                 const std::vector<int>& kept) {
  const int num_blocks = static_cast<int>(list.blocks.size());
  if (kept.empty() || kept.front() != 0 || kept.back() != num_blocks - 1) {
    return std::nullopt;
  }
  std::map<ValueId, ValueId> instead;  // of what the last block of a cut segment hands on
  std::set<ValueId> handed_on;         // to the first block of one
  std::vector<NodeId> nodes;
  std::vector<bool> stays(static_cast<size_t>(forward.num_nodes()), false);
  for (size_t i = 0; i < kept.size(); ++i) {
    const Block& block = list.blocks[static_cast<size_t>(kept[i])];
    for (const NodeId id : block.forward) {
      stays[static_cast<size_t>(id)] = true;
    }
    if (i == 0 || kept[i] == kept[i - 1] + 1) {
      continue;
    }
    const Block& before = list.blocks[static_cast<size_t>(kept[i - 1])];
    if (block.input == kNoValue || before.output == kNoValue || !before.also_crossing.empty() ||
        !list.blocks[static_cast<size_t>(kept[i]) - 1].also_crossing.empty() ||
        !(forward.value(block.input).type == forward.value(before.output).type)) {
      return std::nullopt;
    }
    instead[block.input] = before.output;
    handed_on.insert(before.output);
  }
  // A parameter's gradient is made of all its uses.
  std::map<ValueId, size_t> first_reader;
  for (size_t b = 0; b < list.blocks.size(); ++b) {
    for (const ValueId id : read_parameters(forward, list.blocks[b])) {
      const size_t first = first_reader.emplace(id, b).first->second;
      if (first != b && !(is_kept(kept, first) && is_kept(kept, b))) {
        return std::nullopt;
      }
    }
  }
  Graph graph = forward;
  for (NodeId id = 0; id < forward.num_nodes(); ++id) {
    if (!stays[static_cast<size_t>(id)]) {
      // What else it reads of what stays would be left without a use.
      for (const ValueId input : forward.node(id).inputs) {
        const NodeId from = input == kNoValue ? kNoNode : forward.value(input).producer;
        if (from != kNoNode && stays[static_cast<size_t>(from)] && handed_on.count(input) == 0 &&
            list.trained[static_cast<size_t>(input)]) {
          return std::nullopt;
        }
      }
      continue;
    }
    nodes.push_back(id);
    for (ValueId& input : graph.node(id).inputs) {
      const auto found = instead.find(input);
      input = found == instead.end() ? input : found->second;
      const NodeId from = input == kNoValue ? kNoNode : forward.value(input).producer;
      if (from != kNoNode && !stays[static_cast<size_t>(from)]) {
        return std::nullopt;  // made in a block that goes, read elsewhere too
      }
    }
  }
  const auto goes = [&](ValueId id) {
    const NodeId from = forward.value(id).producer;
    return from != kNoNode && !stays[static_cast<size_t>(from)];
  };
  if (std::any_of(graph.outputs().begin(), graph.outputs().end(), goes)) {
    return std::nullopt;
  }
  return graph.subgraph(nodes, nullptr, /*drop_unused=*/true);
}

namespace {

// The chain of the whole model from that of the short one.
class Chain {
 public:
  Chain(const Graph& forward,
        const BlockList& list,
        const std::vector<int>& kept,
        ModelBlocks model)
      : forward_(forward), list_(list), kept_(kept), model_(std::move(model)) {}

  std::optional<ModelBlocks> run() {
    if (!kept_correspond()) {
      return std::nullopt;
    }
    ModelBlocks whole = model_;
    whole.blocks.clear();
    whole.last_source.clear();
    whole.parameter_names.clear();
    whole.product_names.clear();
    whole.shared_parameters.assign(model_.shared_parameters.size(), 0);
    whole.num_parameters = 0;
    std::map<ValueId, size_t> first_block;
    std::set<ValueId> counted;
    int last = 0;
    double nodes = 0;
    for (size_t b = 0; b < list_.blocks.size(); ++b) {
      const size_t like = short_block(b);
      const int block_class = model_.blocks[like];
      whole.blocks.push_back(block_class);
      for (const NodeId id : list_.blocks[b].forward) {
        last = std::max(last, forward_.node(id).source_index);
      }
      whole.last_source.push_back(last);
      double shared = 0;
      std::vector<std::string> names;
      for (const ValueId id : trained_parameters(b, like)) {
        const auto size = static_cast<double>(num_elements(forward_.value(id).type.shape));
        names.push_back(forward_.value(id).name);
        shared += first_block.emplace(id, b).first->second != b ? size : 0;
        whole.num_parameters += counted.insert(id).second ? size : 0;
      }
      whole.parameter_names.push_back(std::move(names));
      if (!add_products(b, like, &whole)) {
        return std::nullopt;
      }
      double& most = whole.shared_parameters[static_cast<size_t>(block_class)];
      most = std::max(most, shared);
      const Block& own = model_.classes[static_cast<size_t>(block_class)];
      nodes += static_cast<double>(own.forward.size() + own.backward.size());
    }
    double short_nodes = 0;
    for (size_t k = 0; k < model_.blocks.size(); ++k) {
      const Block& own = model_.classes[static_cast<size_t>(model_.blocks[k])];
      const auto size = static_cast<double>(own.forward.size() + own.backward.size());
      short_nodes += size;
      if (k >= kept_.size()) {  // the loss
        whole.blocks.push_back(model_.blocks[k]);
        whole.last_source.push_back(std::max(last, model_.last_source[k]));
        whole.parameter_names.push_back(model_.parameter_names[k]);
        whole.product_names.push_back(model_.product_names[k]);
        nodes += size;
      }
    }
    whole.num_nodes = static_cast<int>(nodes / short_nodes * model_.num_nodes);
    return whole;
  }

 private:
  // The training graph's blocks are those of the forward graph, but for what follows them.
  bool kept_correspond() const {
    if (model_.blocks.size() < kept_.size()) {
      return false;
    }
    std::map<int, int> class_of;  // of the forward graph's classes
    int last = 0;
    for (size_t k = 0; k < kept_.size(); ++k) {
      const Block& block = list_.blocks[static_cast<size_t>(kept_[k])];
      for (const NodeId id : block.forward) {
        last = std::max(last, forward_.node(id).source_index);
      }
      if (model_.last_source[k] != last ||
          class_of.emplace(block.block_class, model_.blocks[k]).first->second != model_.blocks[k]) {
        return false;
      }
    }
    return true;
  }

  // A block of the short model that is equal to block `b` of the whole.
  size_t short_block(size_t b) {
    if (short_of_class_.empty()) {
      for (size_t k = 0; k < kept_.size(); ++k) {
        short_of_class_.emplace(list_.blocks[static_cast<size_t>(kept_[k])].block_class, k);
      }
    }
    return short_of_class_.at(list_.blocks[b].block_class);
  }

  // Of block `b`: those that correspond to parameters that the short model's loss depends on.
  std::vector<ValueId> trained_parameters(size_t b, size_t like) const {
    std::vector<ValueId> found = read_parameters(forward_, list_.blocks[b]);
    const std::vector<ValueId> known =
        read_parameters(forward_, list_.blocks[static_cast<size_t>(kept_[like])]);
    const std::vector<std::string>& trained = model_.parameter_names[like];
    std::vector<ValueId> result;
    for (size_t i = 0; i < found.size() && i < known.size(); ++i) {
      if (std::find(trained.begin(), trained.end(), forward_.value(known[i]).name) !=
          trained.end()) {
        result.push_back(found[i]);
      }
    }
    return result;
  }

  // A backward node is called after its forward node.
  bool add_products(size_t b, size_t like, ModelBlocks* whole) const {
    const Block& own = list_.blocks[b];
    const Block& known = list_.blocks[static_cast<size_t>(kept_[like])];
    std::vector<std::string>& names = whole->product_names.emplace_back();
    for (const std::string& name : model_.product_names[like]) {
      size_t longest = 0;
      std::string renamed;
      for (size_t i = 0; i < known.forward.size(); ++i) {
        const std::string& stem = forward_.node(known.forward[i]).name;
        const bool after = name == stem || name.rfind(stem + "/", 0) == 0;
        if (after && stem.size() >= longest) {
          longest = stem.size();
          renamed = forward_.node(own.forward[i]).name + name.substr(stem.size());
        }
      }
      if (renamed.empty() && !name.empty()) {
        return false;
      }
      names.push_back(std::move(renamed));
    }
    return true;
  }

  const Graph& forward_;
  const BlockList& list_;
  const std::vector<int>& kept_;
  const ModelBlocks model_;
  std::map<int, size_t> short_of_class_;
};

}  // namespace

std::optional<SizedModel> short_model_blocks(const Graph& forward,
                                             int64_t micro_batch,
                                             const TrainForward& train,
                                             const TrainForward& train_as_run) {
  const BlockList list = find_blocks(forward);
  std::vector<int> classes;
  for (const Block& block : list.blocks) {
    classes.push_back(block.block_class);
  }
  const int num_blocks = static_cast<int>(classes.size());
  const std::vector<int> kept = without_repetitions(classes, 0, num_blocks, 1);
  std::optional<Graph> graph = keep_blocks(forward, list, kept);
  if (!graph) {
    return std::nullopt;
  }
  const Graph of_run = train_as_run ? *graph : Graph{};
  ModelBlocks model = model_blocks(train(std::move(*graph)), micro_batch);
  SizedModel result;
  if (train_as_run) {
    const TrainingGraph training = train_as_run(of_run);
    result.as_run = model_blocks(
        training, micro_batch, blocks_at(training.graph, model.last_source, model.blocks));
  }
  std::optional<ModelBlocks> whole = Chain(forward, list, kept, std::move(model)).run();
  if (!whole) {
    return std::nullopt;
  }
  result.blocks = std::move(*whole);
  return result;
}

}  // namespace trainrt
