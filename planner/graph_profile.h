// A training graph -> the profile the search works on: blocks with kernels, bytes and collectives
// of one tensor rank, priced from the operators' own cost and sharding rules.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/training_graph.h"
#include "planner/engine.h"
#include "planner/model_blocks.h"
#include "planner/model_profile.h"
#include "planner/sharding_search.h"

namespace trainrt {

struct GraphProfileRequest {
  const ModelBlocks* model = nullptr;  // at the micro-batch size to profile
  const CostModel* cost = nullptr;     // of the devices the sharding is chosen for
  const GroupLinks* tensor_group = nullptr;
  int tensor_parallel = 1;
  bool sequence_parallel = false;
  // Bytes of a float element where the graph holds float32: 4, or 2 when 16-bit numbers stand for
  // it outside the update.
  double float_bytes = 4;
  // Convolutions of an engine that keeps images channels first, where the device multiplies
  // channels last: each image is rearranged before and after.
  bool rearranges_images = false;
  bool split_at_any_price = false;     // see ShardingRequest
  bool split_for_memory = false;       // no parameter is held whole that can be cut
  const DeviceSpec* device = nullptr;  // for the kernels' workspaces; null: none are counted
  // What a given plan demands; null: nothing. `choose_padding`: products are padded where the cost
  // model says that it pays, unless the plan names paddings itself.
  const BlockPins* pins = nullptr;
  bool choose_padding = false;
  // The same blocks as a run has them, casts included: for memory. Null: `model` tells.
  const ModelBlocks* memory = nullptr;
};

// A product or convolution that runs padded.
struct PaddedNode {
  int64_t multiple = 1;
  double seconds = 0;        // as padded, of one tensor rank and micro-batch, copies included
  double plain_seconds = 0;  // without padding
  double flops = 0, plain_flops = 0;  // of the products
  double bytes = 0, plain_bytes = 0;  // read and written, copies included
};

struct GraphProfile {
  ModelProfile profile;
  // Source index of the last forward node of each block: where a plan may cut.
  std::vector<int> last_source;
  // Tensors that are split over the tensor group, by name.
  std::map<std::string, Placement> placements;
  std::map<std::string, PaddedNode> padding;  // by node name
  int num_nodes = 0;                          // of the training graph
  double parameters = 0;                      // elements of the whole model
  double optimizer_bytes = 0;                 // per parameter element
};

GraphProfile graph_profile(const GraphProfileRequest& request);

}  // namespace trainrt
