#include "parallel/message_lanes.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "graph/base/error.h"

namespace trainrt {

namespace {

std::vector<int> only(const std::vector<int>& tags, const std::set<int>& wanted) {
  std::vector<int> kept;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(kept), [&](int tag) {
    return wanted.count(tag) != 0;
  });
  return kept;
}

}  // namespace

std::map<int, int> share_lanes(const std::vector<int>& sent, const std::vector<int>& received) {
  std::map<int, int> lane_of;
  std::vector<std::set<int>> lanes;
  std::set<int> tags(sent.begin(), sent.end());
  tags.insert(received.begin(), received.end());
  for (const int tag : tags) {
    TRAINRT_CHECK(std::count(sent.begin(), sent.end(), tag) ==
                      std::count(received.begin(), received.end(), tag),
                  "message ",
                  tag,
                  " is not received as often as it is sent");
    const auto fits = [&](const std::set<int>& lane) {
      std::set<int> joined = lane;
      joined.insert(tag);
      return only(sent, joined) == only(received, joined);
    };
    auto at = std::find_if(lanes.begin(), lanes.end(), fits);
    if (at == lanes.end()) {
      at = lanes.insert(lanes.end(), std::set<int>());
    }
    at->insert(tag);
    lane_of[tag] = static_cast<int>(at - lanes.begin());
  }
  return lane_of;
}

// The ranks go through their messages as far as they can; who then waits for a free copy gets one
// more, until all are through.
std::vector<CopiesOfMessages> copies_on_way(const std::vector<std::vector<Message>>& of_ranks,
                                            int at_least) {
  std::vector<CopiesOfMessages> copies(of_ranks.size());
  std::vector<size_t> next(of_ranks.size(), 0);
  std::map<std::tuple<int, int, int>, int> on_way;  // by sender, receiver, tag
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    for (const Message& m : of_ranks[rank]) {
      if (m.sends && m.peer != static_cast<int>(rank)) {
        int& own = copies[rank][{m.peer, m.tag}];
        own = std::min(at_least, own + 1);
      }
    }
  }
  // Whether the next message of `rank` has taken place.
  const auto advance = [&](size_t rank) {
    const Message& m = of_ranks[rank][next[rank]];
    const int self = static_cast<int>(rank);
    if (m.peer != self && m.sends) {
      int& waiting = on_way[{self, m.peer, m.tag}];
      if (waiting == copies[rank].at({m.peer, m.tag})) {
        return false;
      }
      ++waiting;
    } else if (m.peer != self) {
      int& waiting = on_way[{m.peer, self, m.tag}];
      if (waiting == 0) {
        return false;
      }
      --waiting;
    }
    ++next[rank];
    return true;
  };
  const auto advance_all = [&] {
    bool moved = false;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      while (next[rank] < of_ranks[rank].size() && advance(rank)) {
        moved = true;
      }
    }
    return moved;
  };
  const auto add_copies = [&] {
    bool added = false;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      if (next[rank] < of_ranks[rank].size() && of_ranks[rank][next[rank]].sends) {
        const Message& m = of_ranks[rank][next[rank]];
        ++copies[rank].at({m.peer, m.tag});
        added = true;
      }
    }
    return added;
  };
  while (advance_all() || add_copies()) {
  }
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    TRAINRT_CHECK(next[rank] == of_ranks[rank].size(),
                  "rank ",
                  rank,
                  " waits for message ",
                  of_ranks[rank][next[rank]].tag,
                  " of rank ",
                  of_ranks[rank][next[rank]].peer,
                  ", which never sends it, or waits for this one");
  }
  return copies;
}

}  // namespace trainrt
