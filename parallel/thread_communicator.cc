// A collective has two meetings. At the first every rank has published what it calls, and the
// pointers; then each does its part: rank r reduces segment r in rank order and writes the result
// to every rank's buffer, or copies what it receives. At the second all parts are done and the
// buffers are their owners' again: a rank that leaves by an exception waits until nobody is at its
// part any more. One mutex and one condition serve a whole world: ranks are few, and an abort must
// wake them all.
#include "parallel/thread_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "graph/base/error.h"
#include "parallel/reduce_in_order.h"

namespace trainrt {

namespace {

// What one rank calls; equal over the group, or the ranks disagree about the program.
struct Call {
  const char* name = "";
  int64_t count = 0;  // elements of all tensors
  DType dtype = DType::kFloat32;
  int root = -1;
  size_t num_tensors = 1;
  bool operator==(const Call& other) const {
    return std::strcmp(name, other.name) == 0 && count == other.count && dtype == other.dtype &&
           root == other.root && num_tensors == other.num_tensors;
  }
};

std::string call_string(const Call& call) {
  return concat(call.name,
                " of ",
                call.count,
                " ",
                dtype_name(call.dtype),
                call.num_tensors == 1 ? "" : concat(" in ", call.num_tensors, " tensors"));
}

// What a rank shows to the others: its tensors, of the kind that the call takes.
struct Operands {
  const void* input = nullptr;
  const std::vector<WholeTensor>* whole = nullptr;
  const std::vector<CutTensor>* cut = nullptr;
  const std::vector<int64_t>* counts = nullptr;  // sent, of an all_to_all
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::chrono::milliseconds deadline;
  std::optional<std::string> failure;
  // Groups that some member has made and others have yet to pick up.
  std::map<std::tuple<const void*, int64_t, int>, std::shared_ptr<struct Group>> new_groups;
};

struct Group {
  std::vector<int> members;  // world ranks
  int64_t sequence = 0;      // of the collective that is under way
  int arrived = 0;
  int working = 0;  // ranks between the two meetings, at the operands of all
  std::vector<bool> present;
  std::vector<Call> calls;
  std::vector<Operands> operands;  // by rank, during a call
  int64_t meetings = 0;            // ended
  std::vector<int64_t> noted;      // calls beside this communicator, by rank
  std::map<std::tuple<int, int, int>, std::deque<std::vector<std::byte>>> mail;  // from, to, tag

  explicit Group(std::vector<int> ranks) : members(std::move(ranks)) {
    const size_t n = members.size();
    present.resize(n, false);
    calls.resize(n);
    operands.resize(n);
    noted.resize(n);
  }
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(group_->members.size()); }

  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;

  void all_reduce(const std::vector<WholeTensor>& tensors,
                  DType dtype,
                  ReductionKind reduction) override {
    int64_t count = 0;
    for (const WholeTensor& tensor : tensors) {
      count += tensor.count;
    }
    collective({"all_reduce", count, dtype, -1, tensors.size()}, {.whole = &tensors}, [&] {
      const auto [first, last] = part(count);
      int64_t at = 0;  // of the tensor's first element among all
      for (size_t t = 0; t < tensors.size(); ++t) {
        std::vector<const void*> inputs;
        std::vector<void*> outputs;
        for (const Operands& other : group_->operands) {
          const WholeTensor& tensor = other.whole->at(t);
          require_same_tensor(t, tensors[t].count, tensor.count);
          inputs.push_back(tensor.data);
          outputs.push_back(tensor.data);
        }
        reduce_in_order(inputs,
                        outputs,
                        std::clamp<int64_t>(first - at, 0, tensors[t].count),
                        std::clamp<int64_t>(last - at, 0, tensors[t].count),
                        dtype,
                        reduction);
        at += tensors[t].count;
      }
    });
  }

  void reduce_scatter(const std::vector<CutTensor>& tensors,
                      DType dtype,
                      ReductionKind reduction) override {
    collective(
        {"reduce_scatter", total(tensors), dtype, -1, tensors.size()}, {.cut = &tensors}, [&] {
          for (size_t t = 0; t < tensors.size(); ++t) {
            const std::vector<int64_t>& counts = tensors[t].counts;
            const int64_t skip = before(counts, rank_) * dtype_bytes(dtype);
            std::vector<const void*> segments;
            for (const Operands& other : group_->operands) {
              const CutTensor& tensor = other.cut->at(t);
              require_same_tensor(t, total(counts), total(tensor.counts));
              segments.push_back(static_cast<const std::byte*>(tensor.input) + skip);
            }
            reduce_in_order(segments,
                            {tensors[t].output},
                            0,
                            counts.at(static_cast<size_t>(rank_)),
                            dtype,
                            reduction);
          }
        });
  }

  void all_gather(const std::vector<CutTensor>& tensors, DType dtype) override {
    collective({"all_gather", total(tensors), dtype, -1, tensors.size()}, {.cut = &tensors}, [&] {
      for (size_t t = 0; t < tensors.size(); ++t) {
        const std::vector<int64_t>& counts = tensors[t].counts;
        std::byte* to = static_cast<std::byte*>(tensors[t].output);
        for (size_t r = 0; r < counts.size(); ++r) {
          const CutTensor& tensor = group_->operands[r].cut->at(t);
          require_same_tensor(t, counts[r], tensor.counts.at(r));
          const size_t bytes = static_cast<size_t>(counts[r] * dtype_bytes(dtype));
          copy(to, tensor.input, bytes);
          to += bytes;
        }
      }
    });
  }

  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    collective({"all_to_all", 0, dtype}, {.input = input, .counts = &send_counts}, [&] {
      std::byte* to = static_cast<std::byte*>(output);
      std::string problem;
      for (size_t r = 0; r < recv_counts.size(); ++r) {
        const std::vector<int64_t>& sent = *group_->operands[r].counts;
        const size_t bytes = static_cast<size_t>(recv_counts[r] * dtype_bytes(dtype));
        if (sent.at(static_cast<size_t>(rank_)) != recv_counts[r]) {
          problem = concat("all_to_all #",
                           group_->sequence,
                           ": rank ",
                           group_->members[r],
                           " sends ",
                           sent[static_cast<size_t>(rank_)],
                           " elements to rank ",
                           world_rank(),
                           ", which expects ",
                           recv_counts[r]);
          break;
        }
        copy(to,
             static_cast<const std::byte*>(group_->operands[r].input) +
                 before(sent, rank_) * dtype_bytes(dtype),
             bytes);
        to += bytes;
      }
      if (!problem.empty()) {
        fail(problem);
      }
    });
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    collective({"broadcast", bytes, DType::kUInt8, root}, {.input = data}, [&] {
      if (rank_ != root) {
        copy(
            data, group_->operands.at(static_cast<size_t>(root)).input, static_cast<size_t>(bytes));
      }
    });
  }

  void send(const void* data, int64_t bytes, int peer, int tag) override {
    const std::byte* from = static_cast<const std::byte*>(data);
    std::lock_guard lock(world_->mutex);
    throw_if_failed_locked();
    group_->mail[{rank_, peer, tag}].emplace_back(from, from + bytes);
    world_->changed.notify_all();
  }

  void recv(void* data, int64_t bytes, int peer, int tag) override {
    std::unique_lock lock(world_->mutex);
    std::deque<std::vector<std::byte>>& box = group_->mail[{peer, rank_, tag}];
    wait(
        lock,
        [&] { return !box.empty(); },
        [&] {
          return concat("rank ",
                        world_rank(),
                        " waited for a message (tag ",
                        tag,
                        ", ",
                        bytes,
                        " bytes) of rank ",
                        group_->members.at(static_cast<size_t>(peer)),
                        ", which did not send it");
        });
    const std::vector<std::byte> message = std::move(box.front());
    box.pop_front();
    lock.unlock();
    if (static_cast<int64_t>(message.size()) != bytes) {
      fail(concat("rank ",
                  world_rank(),
                  " expects ",
                  bytes,
                  " bytes (tag ",
                  tag,
                  ") of rank ",
                  group_->members.at(static_cast<size_t>(peer)),
                  ", which sent ",
                  message.size()));
    }
    copy(data, message.data(), message.size());
  }

  void barrier() override {
    collective({"barrier"}, {}, [] {});
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    const int64_t mine[2] = {color, key};
    std::vector<int64_t> all(2 * static_cast<size_t>(world_size()));
    all_gather(mine,
               all.data(),
               std::vector<int64_t>(static_cast<size_t>(world_size()), 2),
               DType::kInt64);
    std::vector<std::pair<int64_t, int>> order;  // key, rank
    for (int r = 0; r < world_size(); ++r) {
      if (all[2 * static_cast<size_t>(r)] == color) {
        order.emplace_back(all[2 * static_cast<size_t>(r) + 1], r);
      }
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    int rank = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      members.push_back(group_->members[static_cast<size_t>(order[i].second)]);
      rank = order[i].second == rank_ ? static_cast<int>(i) : rank;
    }
    std::shared_ptr<Group> group;
    {
      std::lock_guard lock(world_->mutex);
      std::shared_ptr<Group>& shared = world_->new_groups[{group_.get(), ++splits_, color}];
      if (shared == nullptr) {
        shared = std::make_shared<Group>(members);
      }
      group = shared;
    }
    barrier();  // all have picked up their group: the entry may go
    std::lock_guard lock(world_->mutex);
    world_->new_groups.erase({group_.get(), splits_, color});
    return std::make_unique<ThreadCommunicator>(world_, std::move(group), rank);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      std::lock_guard lock(world_->mutex);
      if (!world_->failure) {
        world_->failure = concat("rank ", world_rank(), " failed: ", reason);
      }
      world_->changed.notify_all();
    } catch (...) {  // nothing can be said any more; the others end by their deadline
    }
  }

  void throw_if_failed() const override {
    const std::lock_guard lock(world_->mutex);
    throw_if_failed_locked();
  }

  std::string failure() const override {
    std::lock_guard lock(world_->mutex);
    return world_->failure.value_or("");
  }

  void note_calls(int64_t number) override {
    std::lock_guard lock(world_->mutex);
    group_->noted[static_cast<size_t>(rank_)] = number;
  }

  std::vector<int> ranks_behind(int64_t number) const override {
    std::lock_guard lock(world_->mutex);
    std::vector<int> ranks;
    for (size_t r = 0; r < group_->noted.size(); ++r) {
      if (group_->noted[r] < number) {
        ranks.push_back(group_->members[r]);
      }
    }
    return ranks;
  }

 private:
  int world_rank() const { return group_->members[static_cast<size_t>(rank_)]; }

  static int64_t total(const std::vector<CutTensor>& tensors) {
    int64_t sum = 0;
    for (const CutTensor& tensor : tensors) {
      sum += total(tensor.counts);
    }
    return sum;
  }
  static int64_t total(const std::vector<int64_t>& counts) {
    return before(counts, static_cast<int>(counts.size()));
  }
  static int64_t before(const std::vector<int64_t>& counts, int rank) {
    int64_t sum = 0;
    for (int r = 0; r < rank; ++r) {
      sum += counts[static_cast<size_t>(r)];
    }
    return sum;
  }
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0 && to != from) {
      std::memcpy(to, from, bytes);
    }
  }
  // This rank's part of `count` elements, cut at cache lines.
  std::pair<int64_t, int64_t> part(int64_t count) const {
    const int64_t step = ((count + world_size() - 1) / world_size() + 63) / 64 * 64;
    return {std::min(count, rank_ * step), std::min(count, (rank_ + 1) * step)};
  }

  void throw_if_failed_locked() const {
    if (world_->failure) {
      TRAINRT_FAIL(kCommunication, *world_->failure);
    }
  }

  // Publishes a failure that this rank has found, and throws it.
  [[noreturn]] void fail(const std::string& message) {
    std::lock_guard lock(world_->mutex);
    fail_locked(message);
  }
  [[noreturn]] void fail_locked(const std::string& message) {
    if (!world_->failure) {
      world_->failure = message;
    }
    world_->changed.notify_all();
    TRAINRT_FAIL(kCommunication, *world_->failure);
  }

  // The elements of a bucket add up to the same on all ranks, but may be cut differently.
  void require_same_tensor(size_t t, int64_t own, int64_t other) {
    if (own != other) {
      fail(concat("ranks disagree at collective #",
                  group_->sequence,
                  ": tensor ",
                  t,
                  " has ",
                  own,
                  " elements on rank ",
                  world_rank(),
                  ", and ",
                  other,
                  " on another"));
    }
  }

  template <typename Done, typename Message>
  void wait(std::unique_lock<std::mutex>& lock, Done&& done, Message&& message) {
    const auto until = std::chrono::steady_clock::now() + world_->deadline;
    const bool in_time = world_->changed.wait_until(
        lock, until, [&] { return world_->failure.has_value() || done(); });
    throw_if_failed_locked();
    if (!in_time) {
      fail_locked(concat(message(), " within ", world_->deadline.count(), " ms"));
    }
  }

  // Waits until every rank of the group has come.
  void meet(std::unique_lock<std::mutex>& lock, const char* name) {
    Group& group = *group_;
    const int64_t meeting = group.meetings;
    group.present[static_cast<size_t>(rank_)] = true;
    if (++group.arrived == world_size()) {
      group.arrived = 0;
      group.present.assign(group.present.size(), false);
      ++group.meetings;
      world_->changed.notify_all();
      return;
    }
    wait(
        lock,
        [&] { return group.meetings != meeting; },
        [&] {
          std::string missing;
          for (size_t r = 0; r < group.present.size(); ++r) {
            if (!group.present[r]) {
              missing += concat(missing.empty() ? "" : ", ", group.members[r]);
            }
          }
          return concat(
              "rank ", world_rank(), ": ", name, " #", group.sequence, ": missing rank ", missing);
        });
  }

  // `work` is this rank's part, done when all have published their operands.
  template <typename Work>
  void collective(const Call& call, const Operands& operands, Work&& work) {
    try {
      begin(call, operands);
      work();
      end();
    } catch (...) {
      leave();
      throw;
    }
  }

  void begin(const Call& call, const Operands& operands) {
    std::unique_lock lock(world_->mutex);
    throw_if_failed_locked();
    Group& group = *group_;
    const size_t self = static_cast<size_t>(rank_);
    group.calls[self] = call;
    group.operands[self] = operands;
    meet(lock, call.name);
    for (size_t r = 0; r < group.calls.size(); ++r) {
      if (!(group.calls[r] == call)) {
        fail_locked(concat("ranks disagree at collective #",
                           group.sequence,
                           ": rank ",
                           world_rank(),
                           " calls ",
                           call_string(call),
                           ", rank ",
                           group.members[r],
                           " ",
                           call_string(group.calls[r])));
      }
    }
    works_ = true;
    ++group.working;
  }

  void end() {
    std::unique_lock lock(world_->mutex);
    stop_working();
    throw_if_failed_locked();
    const bool last = group_->arrived + 1 == world_size();
    if (last) {
      ++group_->sequence;
    }
    meet(lock, group_->calls[static_cast<size_t>(rank_)].name);
  }

  // Before this rank's operands go out of being. Others are at them for a moment at most.
  void leave() {
    std::unique_lock lock(world_->mutex);
    stop_working();
    while (group_->working > 0) {
      world_->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  void stop_working() {
    group_->working -= works_ ? 1 : 0;
    works_ = false;
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_;
  bool works_ = false;  // is counted among the group's `working`
  int64_t splits_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int world_size, std::chrono::milliseconds deadline) {
  TRAINRT_REQUIRE(world_size >= 1, kInvalidArgument, "a world of ", world_size, " ranks");
  auto world = std::make_shared<World>();
  world->deadline = deadline;
  std::vector<int> members;
  for (int rank = 0; rank < world_size; ++rank) {
    members.push_back(rank);
  }
  const auto group = std::make_shared<Group>(members);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < world_size; ++rank) {
    communicators.push_back(std::make_unique<ThreadCommunicator>(world, group, rank));
  }
  return communicators;
}

}  // namespace trainrt
