// A model as the search prices it: a chain of blocks, and a small graph with one block of each
// class. A model of a hundred layers has a handful of classes, and only they are sharded, priced
// and given other micro-batch sizes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/training_graph.h"
#include "planner/block_finder.h"
#include "planner/node_facts.h"

namespace trainrt {

struct ModelBlocks {
  int64_t micro_batch = 1;  // samples that the types below are made for
  // One block per class. What its nodes read from outside it is here a value without a producer.
  Graph graph;
  std::vector<Block> classes;        // ids in `graph`
  std::vector<bool> trained;         // by value of `graph`: depends on a parameter
  std::vector<bool> awaited;         // by node: the gradient of an earlier block waits for it
  std::shared_ptr<NodeFacts> facts;  // of `graph`
  std::vector<std::vector<ValueId>> parameters;  // by class: those it reads, in order

  std::vector<int> blocks;                                // class of each block, in order
  std::vector<int> last_source;                           // source index of its last forward node
  std::vector<std::vector<std::string>> parameter_names;  // by block, as `parameters` of its class
  std::vector<std::vector<NodeId>> products;              // by class: nodes with matrix products
  std::vector<std::vector<std::string>> product_names;    // by block, as `products` of its class
  // By class: most elements of parameters that some block of it shares with an earlier block.
  std::vector<double> shared_parameters;
  int num_nodes = 0;             // of the whole training graph
  double num_parameters = 0;     // elements of the whole model
  double optimizer_bytes = 0;    // per parameter element
  double tokens_per_sample = 0;  // 0: the input is no sequence of ids
};

// Parameters that a block's forward nodes read, each once, in order.
std::vector<ValueId> read_parameters(const Graph& graph, const Block& block);

ModelBlocks model_blocks(const TrainingGraph& training,
                         int64_t micro_batch,
                         const BlockPins& pins = {});
// With blocks that are known.
ModelBlocks model_blocks(const TrainingGraph& training, int64_t micro_batch, BlockList blocks);

// The model at `micro_batch`, from what it is at two other sizes: a dim or integer attribute that
// differs between them grows evenly with the size. Every node's types are inferred anew and must
// agree; nothing when they do not, or when the two differ in structure beyond what the operators'
// types tell.
std::optional<ModelBlocks> at_micro_batch(const ModelBlocks& smaller,
                                          const ModelBlocks& larger,
                                          int64_t micro_batch);

}  // namespace trainrt
