#include "parallel/shared_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "parallel/reduce_in_order.h"
#include "parallel/shared_mail.h"
#include "parallel/shared_window.h"
#include "parallel/strip.h"

namespace trainrt {

namespace {

using std::chrono::milliseconds;

// Up to here every rank sums all; beyond, each sums its part, which costs a second round.
constexpr int64_t kSumTwice = 16384;  // bytes
constexpr milliseconds kLook{50};     // between two looks at the job's failure

// At the start of each area; then the elements for each rank, then data.
struct AreaHeader {
  CallHeader call;
  int64_t longest = 0;  // of the segments that this rank sends (all_to_all)
};

class SharedCommunicator : public ProcessCommunicator {
 public:
  SharedCommunicator(ProcessGroup group,
                     std::unique_ptr<SharedWindow> window,
                     std::vector<int64_t> processes)
      : ProcessCommunicator(std::move(group)),
        window_(std::move(window)),
        mail_(*window_, rank(), std::move(processes)) {
    data_offset_ =
        static_cast<int64_t>((sizeof(AreaHeader) + size() * sizeof(int64_t) + 63) / 64 * 64);
  }

  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;

  void all_reduce(const std::vector<WholeTensor>& tensors,
                  DType dtype,
                  ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    const Strip data = strip_of(tensors, item);
    const int64_t count = data.bytes() / item;
    CallHeader call = begin(Call::kAllReduce, count, dtype, tensors.size());
    call.reduction = static_cast<int32_t>(reduction);
    if (data.bytes() <= kSumTwice) {
      round(call, [&](std::byte* own) { data.read(0, data.bytes(), own); });
      reduce_areas(0, data, 0, data.bytes(), dtype, reduction);
      end();
      return;
    }
    for (int64_t at = 0; at < count; at += capacity(item)) {
      const int64_t n = std::min(capacity(item), count - at);
      const std::vector<int64_t> parts = even_segments(n, world_size());
      const std::vector<int64_t> offsets = offsets_of(parts);
      round(call, [&](std::byte* own) { data.read(at * item, n * item, own); });
      const std::vector<const void*> inputs = areas(offsets[self()] * item);
      round(call, [&](std::byte* own) {
        reduce_in_order(inputs, {own}, 0, parts[self()], dtype, reduction);
      });
      for (size_t r = 0; r < size(); ++r) {
        data.write((at + offsets[r]) * item, parts[r] * item, area(r));
      }
    }
    end();
  }

  void reduce_scatter(const std::vector<CutTensor>& tensors,
                      DType dtype,
                      ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    const Strip input = wholes_of(tensors, item, true);
    const Strip output = segments_of(tensors, self(), item, false);
    const std::vector<int64_t> counts = counts_of(tensors, size());
    const int64_t count = total(counts);
    const int64_t begins = offsets_of(counts).at(self()), ends = begins + counts[self()];
    CallHeader call = begin(Call::kReduceScatter, count, dtype, tensors.size());
    call.reduction = static_cast<int32_t>(reduction);
    for (int64_t at = 0; at == 0 || at < count; at += capacity(item)) {
      const int64_t n = std::min(capacity(item), count - at);
      round(call, [&](std::byte* own) { input.read(at * item, n * item, own); });
      const int64_t first = std::max(at, begins), last = std::min(at + n, ends);
      if (first < last) {
        reduce_areas((first - at) * item,
                     output,
                     (first - begins) * item,
                     (last - first) * item,
                     dtype,
                     reduction);
      }
    }
    end();
  }

  void all_gather(const std::vector<CutTensor>& tensors, DType dtype) override {
    const int64_t item = dtype_bytes(dtype);
    const Strip input = segments_of(tensors, self(), item, true);
    const Strip output = wholes_of(tensors, item, false);
    const std::vector<int64_t> counts = counts_of(tensors, size());
    const std::vector<int64_t> offsets = offsets_of(counts);
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    const CallHeader call = begin(Call::kAllGather, total(counts), dtype, tensors.size());
    for (int64_t at = 0; at == 0 || at < longest; at += capacity(item)) {
      const auto part = [&](size_t r) {
        return std::clamp<int64_t>(counts[r] - at, 0, capacity(item)) * item;
      };
      round(call, [&](std::byte* own) { input.read(at * item, part(self()), own); });
      for (size_t r = 0; r < size(); ++r) {
        output.write((offsets[r] + at) * item, part(r), area(r));
      }
    }
    end();
  }

  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    const int64_t item = dtype_bytes(dtype);
    const std::vector<int64_t> send_offsets = offsets_of(send_counts);
    const std::vector<int64_t> recv_offsets = offsets_of(recv_counts);
    const int64_t room = capacity(item) / world_size();  // of one segment
    const CallHeader call = begin(Call::kAllToAll, 0, dtype);
    int64_t longest = *std::max_element(send_counts.begin(), send_counts.end());
    sends_ = send_counts;
    longest_ = longest;
    for (int64_t at = 0; at == 0 || at < longest; at += room) {
      round(call, [&](std::byte* own) {
        for (size_t r = 0; r < size(); ++r) {
          copy_bytes(own + static_cast<int64_t>(r) * room * item,
                     static_cast<const std::byte*>(input) + (send_offsets[r] + at) * item,
                     std::clamp<int64_t>(send_counts[r] - at, 0, room) * item);
        }
      });
      for (size_t r = 0; r < size(); ++r) {
        require_count(r, sends_of(r)[self()], recv_counts.at(r));
        longest = std::max(longest, header_of(r).longest);
        copy_bytes(static_cast<std::byte*>(output) + (recv_offsets[r] + at) * item,
                   area(r) + group_offset(room * item),
                   std::clamp<int64_t>(recv_counts[r] - at, 0, room) * item);
      }
    }
    end();
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    std::byte* own_data = static_cast<std::byte*>(data);
    const CallHeader call =
        begin(Call::kBroadcast, bytes, DType::kUInt8, static_cast<size_t>(root));
    for (int64_t at = 0; at == 0 || at < bytes; at += capacity(1)) {
      const int64_t n = std::min(capacity(1), bytes - at);
      round(call, [&](std::byte* own) { copy_bytes(own, own_data + at, rank() == root ? n : 0); });
      if (rank() != root) {
        copy_bytes(own_data + at, area(static_cast<size_t>(root)), n);
      }
    }
    end();
  }

  void barrier() override {
    round(begin(Call::kBarrier, 0, DType::kUInt8), [](std::byte*) {});
    end();
  }

 private:
  // Elements of a piece, a multiple of what a cache line holds.
  int64_t capacity(int64_t item) const {
    return (SharedWindow::kAreaBytes - data_offset_) / item / 64 * 64;
  }
  int64_t group_offset(int64_t bytes) const { return static_cast<int64_t>(self()) * bytes; }

  // What rank r has written in this round.
  std::byte* start(size_t r) const {
    return window_->area(static_cast<int>(r), static_cast<int>(rounds_ % 2));
  }
  const AreaHeader& header_of(size_t r) const {
    return *reinterpret_cast<const AreaHeader*>(start(r));
  }
  int64_t* sends_of(size_t r) const {
    return reinterpret_cast<int64_t*>(start(r) + sizeof(AreaHeader));
  }
  std::byte* area(size_t r) const { return start(r) + data_offset_; }
  std::vector<const void*> areas(int64_t offset) const {
    std::vector<const void*> all;
    for (size_t r = 0; r < size(); ++r) {
      all.push_back(area(r) + offset);
    }
    return all;
  }

  // Bytes [at, at + bytes) of `output` become the reduction of those at `offset` of all areas.
  void reduce_areas(int64_t offset,
                    const Strip& output,
                    int64_t at,
                    int64_t bytes,
                    DType dtype,
                    ReductionKind reduction) const {
    output.visit(at, bytes, [&](std::byte* data, int64_t from, int64_t part) {
      reduce_in_order(areas(offset + from), {data}, 0, part / dtype_bytes(dtype), dtype, reduction);
    });
  }

  void round(const CallHeader& call, const std::function<void(std::byte* own)>& write) {
    ++rounds_;
    const AreaHeader header{call, longest_};
    std::memcpy(start(self()), &header, sizeof(header));
    if (call.call == Call::kAllToAll) {
      std::copy(sends_.begin(), sends_.end(), sends_of(self()));
    }
    write(area(self()));
    window_->arrivals(rank()).raise();
    for (size_t r = 0; r < size(); ++r) {
      if (r != self()) {
        wait_for(r);
        require_same_call(r, call, header_of(r).call);
      }
    }
  }

  void wait_for(size_t r) {
    SharedCounter& arrivals = window_->arrivals(static_cast<int>(r));
    wait_until(r, [&] { return arrivals.wait(rounds_, kLook); });
  }

  // Waits for rank r until `look`, which takes some milliseconds, finds what it looks for.
  void wait_until(size_t r, const std::function<bool()>& look) {
    const auto until = deadline();
    while (!look()) {
      mesh().rendezvous().set_activity("in " + doing(), member(r));
      if (const std::optional<Failure> failure = mesh().rendezvous().failure()) {
        mesh().throw_failure(doing(), *failure);
      }
      if (SteadyClock::now() >= until) {
        mesh().throw_stalled(doing(), member(r));
      }
    }
  }

  void post(const void* data, int64_t bytes, int peer, int tag) override {
    while (!mail_.send(data, bytes, peer, tag)) {
      wait_until(static_cast<size_t>(peer), [&] { return mail_.wait_for_room(peer, kLook); });
    }
  }

  int64_t take(void* data, int64_t bytes, int peer, int tag) override {
    std::optional<int64_t> found;
    while (!(found = mail_.receive(data, bytes, peer, tag))) {
      wait_until(static_cast<size_t>(peer), [&] { return mail_.wait_for_message(peer, kLook); });
    }
    return *found;
  }

  std::unique_ptr<SharedWindow> window_;
  SharedMail mail_;
  int64_t data_offset_ = 0;
  uint32_t rounds_ = 0;
  std::vector<int64_t> sends_;  // of an all_to_all
  int64_t longest_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_communicator(const ProcessGroup& group,
                                                       Communicator& network) {
  const Rendezvous& rendezvous = group.mesh->rendezvous();
  const int size = static_cast<int>(group.members.size());
  const std::string& host = rendezvous.host_of(group.members[0]);
  for (const int member : group.members) {
    if (rendezvous.host_of(member) != host) {
      return nullptr;
    }
  }
  if (!group.may_share_memory || size == 1) {
    return nullptr;
  }
  std::unique_ptr<SharedWindow> window = group.rank == 0 ? SharedWindow::create(size) : nullptr;
  const int64_t own[2] = {::getpid(), window ? window->descriptor() : -1};
  std::vector<int64_t> all(2 * group.members.size());
  network.all_gather(own, all.data(), std::vector<int64_t>(group.members.size(), 2), DType::kInt64);
  std::vector<int64_t> processes;
  for (size_t r = 0; r < group.members.size(); ++r) {
    processes.push_back(all[2 * r]);
  }
  if (group.rank != 0) {
    window = SharedWindow::open(all[0], all[1], size);
  }
  int64_t all_share = window ? 1 : 0;
  network.all_reduce(&all_share, 1, DType::kInt64, ReductionKind::kMin);
  return all_share == 0
             ? nullptr
             : std::make_unique<SharedCommunicator>(group, std::move(window), std::move(processes));
}

}  // namespace trainrt
