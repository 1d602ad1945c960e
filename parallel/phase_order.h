// The order of a rank's nodes within its phases, and the copies that make state updates take
// effect.
#pragma once

#include <utility>
#include <vector>

#include "graph/graph.h"
#include "parallel/program.h"

namespace trainrt {

// The nodes of one phase, before they are ordered.
struct PhaseNodes {
  PhaseKind kind = PhaseKind::kForward;
  int virtual_stage = 0;
  std::vector<NodeId> nodes;
};

// Makes every StateUpdate of `graph` one that happens in place: either the producer of the new
// value works in place on the target and no node of its phase needs the old contents afterwards, or
// an Assign node is appended to the graph and to the phase of the producer.
void settle_updates(Graph& graph, std::vector<PhaseNodes>& phases);

// Pairs of nodes of a phase that keep their order though no data goes from one to the other:
// readers of a persistent value and the node that overwrites it, and messages.
std::vector<std::pair<NodeId, NodeId>> order_without_data(const Graph& graph,
                                                          std::vector<NodeId> nodes);

// Orders each phase for a low peak: updates and accumulations as soon as their gradient is
// complete, with `reduce_early` reduce-scatters too (in an order of the backward's own), what
// nobody but a later node needs right before that node; otherwise the graph's order. Readers of a
// persistent value come before the node that overwrites it.
std::vector<Phase> order_phases(const Graph& graph,
                                const std::vector<PhaseNodes>& phases,
                                bool reduce_early);

}  // namespace trainrt
