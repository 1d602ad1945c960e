#include "parallel/message_lanes.h"

#include <algorithm>
#include <set>

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

}  // namespace trainrt
