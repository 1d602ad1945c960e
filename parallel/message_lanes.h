// How messages between ranks go where a channel delivers in order and a send that is not received
// yet keeps all that follow it waiting (as NCCL's do).
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "parallel/communicator.h"

namespace trainrt {

// Copies of a tensor on their way to another rank: one is made while the one before it waits to be
// received. Enough for every schedule (tests/parallel/message_lanes_test.cc).
inline constexpr int kCopiesOnWay = 2;

// Lanes of a GPU that CUDA can keep apart, as many as its environment asks for
// (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless it is set): others share a connection, where work waits
// for what was put on it before, on whichever lane.
inline constexpr int kMostLanes = 32;

// Tags as the sender sends them and as the receiver receives them, each as often as it comes.
// Returns the lane of each tag, from 0, with as few lanes as a first fit finds: the messages of a
// lane come in the same order on both sides. Throws kInternal when a tag is sent and received a
// different number of times.
std::map<int, int> share_lanes(const std::vector<int>& sent, const std::vector<int>& received);

// A sender copies a tensor before it is sent, and goes on; it waits when all its copies of the tag
// are on their way. Returns how many copies of each (peer, tag) each rank must have, `at_least` (or
// as many as there are messages) or more, so that no rank waits for one that waits for it, when all
// send and receive in the order of `of_ranks`, by rank; messages of a rank to itself are left out.
// Throws kInternal when ranks wait for each other however many there are.
using CopiesOfMessages = std::map<std::pair<int, int>, int>;
std::vector<CopiesOfMessages> copies_on_way(const std::vector<std::vector<Message>>& of_ranks,
                                            int at_least);

}  // namespace trainrt
