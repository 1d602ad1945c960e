// Buckets: collectives of small tensors become one call, which takes several tensors and pays one
// message's latency. Nothing is packed: each tensor stays where the memory plan has put it.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/kernel.h"
#include "graph/training_graph.h"
#include "parallel/plan.h"
#include "parallel/program.h"

namespace trainrt {

// Most bytes of a bucket between so many ranks; a larger tensor goes by itself. A message takes
// latency + bytes / bandwidth, so one of k x latency x bandwidth wastes 1 / (k + 1) of its time,
// and a larger one only begins later. Latency x bandwidth of two ranks is about 200 KB on CPUs
// (shared memory: 40 us at 5 GB/s; TCP: 150 us at 1.2 GB/s) and 5 MB on GPUs (NVLink: 25 us at 200
// GB/s); k is 5. A ring's latency grows with the ranks; between many GPUs, on several hosts, a rank
// adds what Megatron-LM allows it, a million float32.
int64_t bucket_bytes(Backend backend, int num_ranks);

// Joins, in each phase and in its order, the collectives of one group, kind and dtype that make
// gradients, norms or new parameters, and ZeRO-3's gathers of parameters. A bucket runs when the
// last of its tensors is ready; one of parameters, which always are, when the first is wanted.
//
// All ranks of a group form the same buckets, and call them in the same order.
void bucket_collectives(TrainingGraph& local,
                        std::vector<Phase>& phases,
                        const Plan& plan,
                        Backend backend);

}  // namespace trainrt
