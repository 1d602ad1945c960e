// Seconds of a collective from its bytes and the links of its group: NCCL's own model (src/graph/
// tuning.cc), time = latency + bytes / bandwidth, least over algorithm and protocol.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "parallel/topology.h"

namespace trainrt {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };

struct CollectiveTime {
  double seconds = 0;
  std::string_view algorithm;  // "ring/ll128", "tree/simple", "nvls/simple", "none"
};

// `bytes`: of the whole tensor (of all shards together for reduce-scatter and all-gather).
// `architecture` as in DeviceType.
CollectiveTime collective_time(Collective kind,
                               double bytes,
                               const GroupLinks& group,
                               const std::string& architecture);

// One message between two devices; `host_bandwidth` is what the sender gets of the network.
double send_time(double bytes, const GroupLinks& pair);

// What the two ends of a message between CPU ranks of one host are busy with, and how long it is on
// its way after that.
struct MessageTime {
  double sending = 0;
  double travelling = 0;  // until a waiting receiver has it
  double receiving = 0;
};
MessageTime message_time(double bytes, const GroupLinks& pair);

// What links give of their raw rate to a stream of large messages.
double effective_intra_bandwidth(const LinkType& link);
// `raw_bytes_per_second`: what a group has of such links.
double effective_inter_bandwidth(const LinkType& link, double raw_bytes_per_second);

}  // namespace trainrt
