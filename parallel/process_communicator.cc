#include "parallel/process_communicator.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "graph/base/error.h"

namespace trainrt {

namespace {

const char* call_name(Call call) {
  constexpr const char* kNames[] = {
      "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"};
  return kNames[static_cast<int>(call)];
}

std::string call_string(const CallHeader& header) {
  return concat(call_name(header.call),
                " of ",
                header.count,
                " ",
                dtype_name(static_cast<DType>(header.dtype)),
                header.call != Call::kBroadcast && header.detail > 1
                    ? concat(" in ", header.detail, " tensors")
                    : "");
}

bool same_call(const CallHeader& a, const CallHeader& b) {
  return a.call == b.call && a.sequence == b.sequence && a.count == b.count && a.dtype == b.dtype &&
         a.reduction == b.reduction && a.detail == b.detail;
}

}  // namespace

int64_t total(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) {
    sum += count;
  }
  return sum;
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size(), 0);
  for (size_t r = 1; r < counts.size(); ++r) {
    offsets[r] = offsets[r - 1] + counts[r - 1];
  }
  return offsets;
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

std::vector<int64_t> even_segments(int64_t count, int num_ranks) {
  const int64_t step = ((count + num_ranks - 1) / num_ranks + 63) / 64 * 64;
  std::vector<int64_t> counts;
  for (int r = 0; r < num_ranks; ++r) {
    counts.push_back(std::min(count, (r + 1) * step) - std::min(count, r * step));
  }
  return counts;
}

ProcessCommunicator::ProcessCommunicator(ProcessGroup group) : group_(std::move(group)) {
  for (const int rank : group_.members) {
    name_ += concat(name_.empty() ? "ranks " : ", ", rank);
  }
  if (group_.number > 0) {
    name_ = concat("group ", group_.number, " (", name_, ")");
  }
}

void ProcessCommunicator::send(const void* data, int64_t bytes, int peer, int tag) {
  doing_ = message_string("send", bytes, peer, tag);
  if (const std::optional<Failure> failure = mesh().rendezvous().failure()) {
    mesh().throw_failure(doing_, *failure);
  }
  if (peer == rank()) {
    const std::byte* from = static_cast<const std::byte*>(data);
    to_self_[tag].emplace_back(from, from + bytes);
  } else {
    post(data, bytes, peer, tag);
  }
}

void ProcessCommunicator::recv(void* data, int64_t bytes, int peer, int tag) {
  doing_ = message_string("recv", bytes, peer, tag);
  int64_t found = 0;
  if (peer == rank()) {
    std::deque<std::vector<std::byte>>& box = to_self_[tag];
    TRAINRT_REQUIRE(!box.empty(), kCommunication, doing_, ": this rank has sent itself no message");
    found = static_cast<int64_t>(box.front().size());
    copy_bytes(data, box.front().data(), std::min(found, bytes));
    box.pop_front();
  } else {
    found = take(data, bytes, peer, tag);
  }
  if (found != bytes) {
    fail(concat("rank ",
                world_rank(),
                " expects ",
                bytes,
                " bytes (tag ",
                tag,
                ") of rank ",
                member(static_cast<size_t>(peer)),
                ", which sent ",
                found));
  }
  mesh().rendezvous().set_activity("computing, after " + doing_, -1);
}

std::unique_ptr<Communicator> ProcessCommunicator::split(int color, int key) {
  const int64_t mine[3] = {color, key, *group_.next_number};
  std::vector<int64_t> all(3 * size());
  all_gather(mine, all.data(), std::vector<int64_t>(size(), 3), DType::kInt64);
  std::vector<std::pair<int64_t, size_t>> order;  // key, rank
  std::set<int64_t> colors;
  int64_t first = 0;
  for (size_t r = 0; r < size(); ++r) {
    colors.insert(all[3 * r]);
    first = std::max(first, all[3 * r + 2]);
    if (all[3 * r] == color) {
      order.emplace_back(all[3 * r + 1], r);
    }
  }
  std::sort(order.begin(), order.end());
  ProcessGroup group = group_;
  group.members.clear();
  for (size_t i = 0; i < order.size(); ++i) {
    group.members.push_back(member(order[i].second));
    group.rank = order[i].second == self() ? static_cast<int>(i) : group.rank;
  }
  // Numbers that no member has used; two groups with a common member thus have different ones.
  *group.next_number = first + static_cast<int64_t>(colors.size());
  group.number = first + std::distance(colors.begin(), colors.find(color));
  return make_process_communicator(std::move(group));
}

void ProcessCommunicator::abort(const std::string& reason) noexcept {
  try {
    mesh().rendezvous().publish({world_rank(),
                                 ErrorCode::kCommunication,
                                 concat("rank ", world_rank(), " failed: ", reason)});
  } catch (...) {  // nothing can be said any more; the others see the connection end
  }
}

void ProcessCommunicator::throw_if_failed() const {
  if (const std::optional<Failure> failure = mesh().rendezvous().failure()) {
    mesh().throw_failure("computing, after " + doing_, *failure);
  }
}

std::string ProcessCommunicator::failure() const {
  const std::optional<Failure> failure = mesh().rendezvous().failure();
  return failure ? failure->message : "";
}

SteadyClock::time_point ProcessCommunicator::deadline() const {
  return SteadyClock::now() + mesh().rendezvous().deadline();
}

CallHeader ProcessCommunicator::begin(Call call, int64_t count, DType dtype, size_t detail) {
  doing_ = concat(call_name(call), " #", sequence_, " of ", name_);
  CallHeader header;
  header.sequence = sequence_;
  header.call = call;
  header.count = count;
  header.dtype = static_cast<int32_t>(dtype);
  header.detail = static_cast<int32_t>(detail);
  return header;
}

void ProcessCommunicator::end() {
  ++sequence_;
  mesh().rendezvous().set_activity("computing, after " + doing_, -1);
}

void ProcessCommunicator::fail(const std::string& message) {
  mesh().rendezvous().publish({world_rank(), ErrorCode::kCommunication, message});
  TRAINRT_FAIL(kCommunication, message);
}

void ProcessCommunicator::require_same_call(size_t r,
                                            const CallHeader& own,
                                            const CallHeader& other) {
  if (!same_call(own, other)) {
    fail(concat("ranks disagree at collective #",
                sequence_,
                ": rank ",
                world_rank(),
                " calls ",
                call_string(own),
                ", rank ",
                member(r),
                " ",
                call_string(other)));
  }
}

void ProcessCommunicator::require_count(size_t r, int64_t sent, int64_t expected) {
  if (sent != expected) {
    fail(concat(doing_,
                ": rank ",
                member(r),
                " sends ",
                sent,
                " elements to rank ",
                world_rank(),
                ", which expects ",
                expected));
  }
}

std::string ProcessCommunicator::message_string(const char* what,
                                                int64_t bytes,
                                                int peer,
                                                int tag) const {
  return concat(what,
                " (tag ",
                tag,
                ", ",
                bytes,
                " bytes) with rank ",
                group_.members.at(static_cast<size_t>(peer)));
}

}  // namespace trainrt
