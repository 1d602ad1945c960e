// Which messages between two ranks may share a channel that delivers in order (as NCCL does, where
// a send that is not received yet keeps all that follow it waiting).
#pragma once

#include <map>
#include <vector>

namespace trainrt {

// Tags as the sender sends them and as the receiver receives them, each as often as it comes.
// Returns the lane of each tag, from 0, with as few lanes as a first fit finds: the messages of a
// lane come in the same order on both sides. Throws kInternal when a tag is sent and received a
// different number of times.
std::map<int, int> share_lanes(const std::vector<int>& sent, const std::vector<int>& received);

}  // namespace trainrt
