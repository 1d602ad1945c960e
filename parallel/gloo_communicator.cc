// A collective begins with an envelope from every rank to every other: what it calls, and how many
// elements follow. Differences are found before any data moves, and a payload that fits comes
// along, so that scalars need one round. Larger ones go directly between the ranks concerned, in
// pieces: rank r collects piece after piece of segment r from all ranks, sums in rank order and, in
// all_reduce, sends the result to all.
#include "parallel/gloo_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "graph/base/error.h"
#include "parallel/gloo_mesh.h"
#include "parallel/reduce_in_order.h"

namespace trainrt {

namespace {

constexpr int64_t kInlineBytes = 216;  // makes an envelope 256 bytes
constexpr int64_t kScratchBytes = int64_t{8} << 20;
constexpr int64_t kLargestPiece = int64_t{1} << 20;

enum class Call : int32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kMessage
};

const char* call_name(Call call) {
  constexpr const char* kNames[] = {
      "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "send"};
  return kNames[static_cast<int>(call)];
}

struct Envelope {
  int64_t sequence = 0;
  int64_t count = 0;  // of the whole call: equal on all ranks
  int64_t sends = 0;  // elements from the sender to this receiver
  Call call = Call::kBarrier;
  int32_t dtype = 0;
  int32_t reduction = 0;
  int32_t root = -1;
  std::byte payload[kInlineBytes] = {};
};
static_assert(sizeof(Envelope) == 256);

std::string envelope_string(const Envelope& envelope) {
  return concat(call_name(envelope.call),
                " of ",
                envelope.count,
                " ",
                dtype_name(static_cast<DType>(envelope.dtype)));
}

bool same_call(const Envelope& a, const Envelope& b) {
  return a.call == b.call && a.sequence == b.sequence && a.count == b.count && a.dtype == b.dtype &&
         a.reduction == b.reduction && a.root == b.root;
}

enum class SlotKind : uint64_t { kEnvelope, kData, kResult, kMessage, kMessageData };

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

class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(std::shared_ptr<GlooMesh> mesh,
                   std::shared_ptr<int64_t> next_group,
                   std::vector<int> members,
                   int rank,
                   int64_t group)
      : mesh_(std::move(mesh)),
        next_group_(std::move(next_group)),
        members_(std::move(members)),
        rank_(rank),
        group_(group) {
    for (const int member : members_) {
      ranks_text_ += concat(ranks_text_.empty() ? "ranks " : ", ", member);
    }
    if (group > 0) {
      ranks_text_ = concat("group ", group, " (", ranks_text_, ")");
    }
  }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }

  void all_reduce(void* data, int64_t count, DType dtype, ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    std::byte* bytes = static_cast<std::byte*>(data);
    Envelope envelope = begin(Call::kAllReduce, count, dtype);
    envelope.reduction = static_cast<int32_t>(reduction);
    envelope.sends = count;
    if (count * item <= kInlineBytes) {
      meet(
          envelope, [&](size_t) { return bytes; }, equal_counts(count), item);
      reduce_in_order(payloads(data), {data}, 0, count, dtype, reduction);
    } else {
      meet(envelope, nullptr, equal_counts(count), item);
      // Segments end at cache lines.
      const int64_t step = ((count + world_size() - 1) / world_size() + 63) / 64 * 64;
      std::vector<int64_t> counts;
      for (int r = 0; r < world_size(); ++r) {
        counts.push_back(std::min(count, (r + 1) * step) - std::min(count, r * step));
      }
      std::byte* own = bytes + offsets_of(counts)[static_cast<size_t>(rank_)] * item;
      reduce_pieces(bytes, own, counts, dtype, reduction, bytes);
    }
    end();
  }

  void reduce_scatter(const void* input,
                      void* output,
                      const std::vector<int64_t>& counts,
                      DType dtype,
                      ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    const std::byte* bytes = static_cast<const std::byte*>(input);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const int64_t own = counts.at(static_cast<size_t>(rank_));
    Envelope envelope = begin(Call::kReduceScatter, total(counts), dtype);
    envelope.reduction = static_cast<int32_t>(reduction);
    sends_ = counts;
    if (*std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes) {
      meet(
          envelope, [&](size_t r) { return bytes + offsets[r] * item; }, equal_counts(own), item);
      reduce_in_order(payloads(bytes + offsets[static_cast<size_t>(rank_)] * item),
                      {output},
                      0,
                      own,
                      dtype,
                      reduction);
    } else {
      meet(envelope, nullptr, equal_counts(own), item);
      reduce_pieces(bytes, output, counts, dtype, reduction, nullptr);
    }
    end();
  }

  void all_gather(const void* input,
                  void* output,
                  const std::vector<int64_t>& counts,
                  DType dtype) override {
    const int64_t item = dtype_bytes(dtype);
    std::byte* bytes = static_cast<std::byte*>(output);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const size_t self = static_cast<size_t>(rank_);
    Envelope envelope = begin(Call::kAllGather, total(counts), dtype);
    envelope.sends = counts.at(self);
    const bool is_small = *std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes;
    meet(envelope, is_small ? at(input) : nullptr, counts, item);
    copy_bytes(bytes + offsets[self] * item, input, counts[self] * item);
    std::vector<GlooMesh::Transfer> transfers;
    for (size_t r = 0; r < counts.size(); ++r) {
      if (is_small && r != self) {
        copy_bytes(bytes + offsets[r] * item, received_[r].payload, counts[r] * item);
      } else if (r != self) {
        send(input, counts[self] * item, r, SlotKind::kData, transfers);
        receive(bytes + offsets[r] * item, counts[r] * item, r, SlotKind::kData, transfers);
      }
    }
    wait(transfers);
    end();
  }

  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    const int64_t item = dtype_bytes(dtype);
    const std::byte* from = static_cast<const std::byte*>(input);
    std::byte* to = static_cast<std::byte*>(output);
    const std::vector<int64_t> send_offsets = offsets_of(send_counts);
    const std::vector<int64_t> recv_offsets = offsets_of(recv_counts);
    const size_t self = static_cast<size_t>(rank_);
    const Envelope envelope = begin(Call::kAllToAll, 0, dtype);
    sends_ = send_counts;
    meet(envelope, nullptr, recv_counts, item);
    require_count(self, send_counts.at(self), recv_counts.at(self));
    copy_bytes(
        to + recv_offsets[self] * item, from + send_offsets[self] * item, recv_counts[self] * item);
    std::vector<GlooMesh::Transfer> transfers;
    for (size_t r = 0; r < members_.size(); ++r) {
      if (r != self) {
        send(from + send_offsets[r] * item, send_counts[r] * item, r, SlotKind::kData, transfers);
        receive(to + recv_offsets[r] * item, recv_counts[r] * item, r, SlotKind::kData, transfers);
      }
    }
    wait(transfers);
    end();
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    const size_t source = static_cast<size_t>(root);
    Envelope envelope = begin(Call::kBroadcast, bytes, DType::kUInt8);
    envelope.root = root;
    envelope.sends = rank_ == root ? bytes : 0;
    std::vector<int64_t> counts(members_.size(), 0);
    counts.at(source) = bytes;
    const bool is_small = bytes <= kInlineBytes;
    meet(envelope, is_small ? at(data) : nullptr, counts, 1);
    std::vector<GlooMesh::Transfer> transfers;
    if (is_small && rank_ != root) {
      copy_bytes(data, received_[source].payload, bytes);
    } else if (!is_small && rank_ != root) {
      receive(data, bytes, source, SlotKind::kData, transfers);
    } else if (!is_small) {
      for (size_t r = 0; r < members_.size(); ++r) {
        if (r != source) {
          send(data, bytes, r, SlotKind::kData, transfers);
        }
      }
    }
    wait(transfers);
    end();
  }

  void send(const void* data, int64_t bytes, int peer, int tag) override {
    const std::byte* from = static_cast<const std::byte*>(data);
    if (const std::optional<Failure> failure = mesh_->rendezvous().failure()) {
      mesh_->throw_failure(message_string("send", bytes, peer, tag), *failure);
    }
    if (peer == rank_) {
      to_self_[tag].emplace_back(from, from + bytes);
      return;
    }
    Envelope envelope;
    envelope.call = Call::kMessage;
    envelope.sends = bytes;
    const bool is_small = bytes <= kInlineBytes;
    copy_bytes(envelope.payload, data, is_small ? bytes : 0);
    const std::byte* head = reinterpret_cast<const std::byte*>(&envelope);
    const int to = members_.at(static_cast<size_t>(peer));
    mesh_->post({head, head + sizeof(envelope)}, to, slot(SlotKind::kMessage, tag));
    if (!is_small) {
      mesh_->post({from, from + bytes}, to, slot(SlotKind::kMessageData, tag));
    }
  }

  void recv(void* data, int64_t bytes, int peer, int tag) override {
    doing_ = message_string("recv", bytes, peer, tag);
    int64_t found = 0;
    if (peer == rank_) {
      std::deque<std::vector<std::byte>>& box = to_self_[tag];
      TRAINRT_REQUIRE(
          !box.empty(), kCommunication, doing_, ": this rank has sent itself no message");
      found = static_cast<int64_t>(box.front().size());
      copy_bytes(data, box.front().data(), std::min(found, bytes));
      box.pop_front();
    } else {
      const int from = members_.at(static_cast<size_t>(peer));
      Envelope envelope;
      const auto until = SteadyClock::now() + mesh_->rendezvous().deadline();
      mesh_->wait(mesh_->receive(&envelope, sizeof(envelope), from, slot(SlotKind::kMessage, tag)),
                  doing_,
                  until);
      found = envelope.sends;
      if (found == bytes && bytes > kInlineBytes) {
        mesh_->wait(
            mesh_->receive(data, bytes, from, slot(SlotKind::kMessageData, tag)), doing_, until);
      } else {
        copy_bytes(data, envelope.payload, std::min(found, bytes));
      }
    }
    if (found != bytes) {
      fail(concat("rank ",
                  world_rank(),
                  " expects ",
                  bytes,
                  " bytes (tag ",
                  tag,
                  ") of rank ",
                  members_[static_cast<size_t>(peer)],
                  ", which sent ",
                  found));
    }
    mesh_->rendezvous().set_activity("computing, after " + doing_, -1);
  }

  void barrier() override {
    meet(begin(Call::kBarrier, 0, DType::kUInt8), nullptr, equal_counts(0), 1);
    end();
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    const int64_t mine[3] = {color, key, *next_group_};
    std::vector<int64_t> all(3 * members_.size());
    all_gather(mine, all.data(), std::vector<int64_t>(members_.size(), 3), DType::kInt64);
    std::vector<std::pair<int64_t, size_t>> order;  // key, rank
    std::set<int64_t> colors;
    int64_t first = 0;
    for (size_t r = 0; r < members_.size(); ++r) {
      colors.insert(all[3 * r]);
      first = std::max(first, all[3 * r + 2]);
      if (all[3 * r] == color) {
        order.emplace_back(all[3 * r + 1], r);
      }
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    int rank = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      members.push_back(members_[order[i].second]);
      rank = order[i].second == static_cast<size_t>(rank_) ? static_cast<int>(i) : rank;
    }
    // Numbers that no member has used; two groups with a common member thus have different ones.
    *next_group_ = first + static_cast<int64_t>(colors.size());
    const int64_t group = first + std::distance(colors.begin(), colors.find(color));
    return std::make_unique<GlooCommunicator>(mesh_, next_group_, members, rank, group);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      mesh_->rendezvous().publish({world_rank(),
                                   ErrorCode::kCommunication,
                                   concat("rank ", world_rank(), " failed: ", reason)});
    } catch (...) {  // nothing can be said any more; the others see the connection end
    }
  }

 private:
  using Source = std::function<const void*(size_t rank)>;  // payload for a rank

  int world_rank() const { return members_[static_cast<size_t>(rank_)]; }
  std::vector<int64_t> equal_counts(int64_t count) const {
    return std::vector<int64_t>(members_.size(), count);
  }
  static Source at(const void* data) {
    return [data](size_t) { return data; };
  }
  uint64_t slot(SlotKind kind, int tag = 0) const {
    return (static_cast<uint64_t>(group_) << 36) | (static_cast<uint64_t>(kind) << 32) |
           static_cast<uint32_t>(tag);
  }
  std::string message_string(const char* what, int64_t bytes, int peer, int tag) const {
    return concat(what,
                  " (tag ",
                  tag,
                  ", ",
                  bytes,
                  " bytes) with rank ",
                  members_.at(static_cast<size_t>(peer)));
  }

  void send(const void* data,
            int64_t bytes,
            size_t r,
            SlotKind kind,
            std::vector<GlooMesh::Transfer>& transfers) {
    if (bytes > 0) {
      transfers.push_back(mesh_->send(data, bytes, members_[r], slot(kind)));
    }
  }
  void receive(void* data,
               int64_t bytes,
               size_t r,
               SlotKind kind,
               std::vector<GlooMesh::Transfer>& transfers) {
    if (bytes > 0) {
      transfers.push_back(mesh_->receive(data, bytes, members_[r], slot(kind)));
    }
  }
  void wait(const std::vector<GlooMesh::Transfer>& transfers) {
    const auto until = SteadyClock::now() + mesh_->rendezvous().deadline();
    for (const GlooMesh::Transfer& transfer : transfers) {
      mesh_->wait(transfer, doing_, until);
    }
  }

  [[noreturn]] void fail(const std::string& message) {
    mesh_->rendezvous().publish({world_rank(), ErrorCode::kCommunication, message});
    TRAINRT_FAIL(kCommunication, message);
  }

  void require_count(size_t r, int64_t sent, int64_t expected) {
    if (sent != expected) {
      fail(concat(doing_,
                  ": rank ",
                  members_[r],
                  " sends ",
                  sent,
                  " elements to rank ",
                  world_rank(),
                  ", which expects ",
                  expected));
    }
  }

  Envelope begin(Call call, int64_t count, DType dtype) {
    doing_ = concat(call_name(call), " #", sequence_, " of ", ranks_text_);
    sends_.clear();
    Envelope envelope;
    envelope.sequence = sequence_;
    envelope.call = call;
    envelope.count = count;
    envelope.dtype = static_cast<int32_t>(dtype);
    return envelope;
  }

  // Exchanges envelopes; with `source` they carry payloads. recv_counts[r] elements are expected
  // from rank r. sends_, when filled, says how many go to each rank.
  void meet(const Envelope& envelope,
            const Source& source,
            const std::vector<int64_t>& recv_counts,
            int64_t item) {
    const size_t size = members_.size();
    sent_.assign(size, envelope);
    received_.resize(size);
    std::vector<GlooMesh::Transfer> receives, sends;
    for (size_t r = 0; r < size; ++r) {
      if (r != static_cast<size_t>(rank_)) {
        receive(&received_[r], sizeof(Envelope), r, SlotKind::kEnvelope, receives);
      }
    }
    for (size_t r = 0; r < size; ++r) {
      if (r == static_cast<size_t>(rank_)) {
        continue;
      }
      Envelope& own = sent_[r];
      own.sends = sends_.empty() ? envelope.sends : sends_[r];
      if (source) {
        copy_bytes(own.payload, source(r), own.sends * item);
      }
      send(&own, sizeof(Envelope), r, SlotKind::kEnvelope, sends);
    }
    wait(receives);
    wait(sends);
    for (size_t r = 0; r < size; ++r) {
      if (r == static_cast<size_t>(rank_)) {
        continue;
      }
      if (!same_call(received_[r], envelope)) {
        fail(concat("ranks disagree at collective #",
                    sequence_,
                    ": rank ",
                    world_rank(),
                    " calls ",
                    envelope_string(envelope),
                    ", rank ",
                    members_[r],
                    " ",
                    envelope_string(received_[r])));
      }
      require_count(r, received_[r].sends, recv_counts.at(r));
    }
  }

  void end() {
    ++sequence_;
    mesh_->rendezvous().set_activity("computing, after " + doing_, -1);
  }

  // The payloads of all ranks, this one's own being `own`.
  std::vector<const void*> payloads(const void* own) const {
    std::vector<const void*> inputs;
    for (const Envelope& envelope : received_) {
      inputs.push_back(envelope.payload);
    }
    inputs[static_cast<size_t>(rank_)] = own;
    return inputs;
  }

  // Segment r of all ranks' `input`, reduced, into rank r's `output`; then, when `everywhere` is
  // given, to all ranks at its place in there. The pieces of a segment that this rank has sent are
  // not needed any more when the reduced piece arrives, so `everywhere` may be the input.
  void reduce_pieces(const std::byte* input,
                     void* output,
                     const std::vector<int64_t>& counts,
                     DType dtype,
                     ReductionKind reduction,
                     std::byte* everywhere) {
    const int64_t item = dtype_bytes(dtype);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const size_t self = static_cast<size_t>(rank_), size = members_.size();
    const int64_t piece =
        std::min(kLargestPiece, kScratchBytes / static_cast<int64_t>(size)) / item;
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    scratch_.resize(size * static_cast<size_t>(std::min(piece, longest) * item));
    for (int64_t at = 0; at < longest; at += piece) {
      const auto part = [&](size_t r) { return std::clamp<int64_t>(counts[r] - at, 0, piece); };
      std::vector<GlooMesh::Transfer> receives, others;
      std::vector<const void*> inputs(size);
      for (size_t r = 0; r < size; ++r) {
        std::byte* room =
            scratch_.data() + static_cast<int64_t>(r) * std::min(piece, longest) * item;
        inputs[r] = r == self ? input + (offsets[r] + at) * item : room;
        if (r != self) {
          receive(room, part(self) * item, r, SlotKind::kData, receives);
          send(input + (offsets[r] + at) * item, part(r) * item, r, SlotKind::kData, others);
        }
      }
      wait(receives);
      std::byte* result = static_cast<std::byte*>(output) + at * item;
      reduce_in_order(inputs, {result}, 0, part(self), dtype, reduction);
      for (size_t r = 0; r < size && everywhere != nullptr; ++r) {
        if (r != self) {
          std::byte* place = everywhere + (offsets[r] + at) * item;
          send(result, part(self) * item, r, SlotKind::kResult, others);
          receive(place, part(r) * item, r, SlotKind::kResult, others);
        }
      }
      wait(others);
    }
  }

  std::shared_ptr<GlooMesh> mesh_;
  std::shared_ptr<int64_t> next_group_;  // of this process
  std::vector<int> members_;             // world ranks
  int rank_;
  int64_t group_;
  std::string ranks_text_;
  int64_t sequence_ = 0;
  std::string doing_;           // the call that is under way
  std::vector<int64_t> sends_;  // elements to each rank, where they differ
  std::vector<Envelope> sent_, received_;
  std::vector<std::byte> scratch_;
  std::map<int, std::deque<std::vector<std::byte>>> to_self_;  // by tag
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Rendezvous> rendezvous) {
  std::vector<int> members;
  for (int rank = 0; rank < rendezvous->world_size(); ++rank) {
    members.push_back(rank);
  }
  const int rank = rendezvous->rank();
  auto mesh = std::make_shared<GlooMesh>(std::move(rendezvous));
  return std::make_unique<GlooCommunicator>(
      std::move(mesh), std::make_shared<int64_t>(1), std::move(members), rank, 0);
}

}  // namespace trainrt
