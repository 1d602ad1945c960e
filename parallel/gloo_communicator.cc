// A collective begins with an envelope from every rank to every other: what it calls, and how many
// elements follow. Differences are found before any data moves, and a payload that fits comes
// along, so that scalars need one round. Larger ones go directly between the ranks concerned, in
// pieces: rank r collects piece after piece of segment r from all ranks, sums in rank order and, in
// all_reduce, sends the result to all.
#include "parallel/gloo_communicator.h"

#include <algorithm>
#include <functional>

#include "parallel/process_communicator.h"
#include "parallel/reduce_in_order.h"
#include "parallel/shared_communicator.h"

namespace trainrt {

namespace {

constexpr int64_t kInlineBytes = 216;  // makes an envelope 256 bytes
constexpr int64_t kScratchBytes = int64_t{8} << 20;
constexpr int64_t kLargestPiece = int64_t{1} << 20;

struct Envelope {
  CallHeader call;
  int64_t sends = 0;  // elements from the sender to this receiver
  std::byte payload[kInlineBytes] = {};
};

// Comes before a message's data, or with it when it is short.
struct MessageHeader {
  int64_t bytes = 0;
  std::byte payload[kInlineBytes] = {};
};

enum class SlotKind : uint64_t { kHeader, kData, kResult, kMessage, kMessageData };

class GlooCommunicator : public ProcessCommunicator {
 public:
  using ProcessCommunicator::ProcessCommunicator;

  void all_reduce(void* data, int64_t count, DType dtype, ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    std::byte* bytes = static_cast<std::byte*>(data);
    Envelope envelope;
    envelope.call = begin(Call::kAllReduce, count, dtype);
    envelope.call.reduction = static_cast<int32_t>(reduction);
    if (count * item <= kInlineBytes) {
      meet(envelope, at(data), equal_counts(count), equal_counts(count), item);
      reduce_in_order(payloads(data), {data}, 0, count, dtype, reduction);
    } else {
      meet(envelope, nullptr, equal_counts(count), equal_counts(count), item);
      const std::vector<int64_t> counts = even_segments(count, world_size());
      std::byte* own = bytes + offsets_of(counts)[self()] * item;
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
    const int64_t own = counts.at(self());
    Envelope envelope;
    envelope.call = begin(Call::kReduceScatter, total(counts), dtype);
    envelope.call.reduction = static_cast<int32_t>(reduction);
    if (*std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes) {
      const Source segment = [&](size_t r) { return bytes + offsets[r] * item; };
      meet(envelope, segment, counts, equal_counts(own), item);
      reduce_in_order(payloads(bytes + offsets[self()] * item), {output}, 0, own, dtype, reduction);
    } else {
      meet(envelope, nullptr, counts, equal_counts(own), item);
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
    const size_t own = self();
    Envelope envelope;
    envelope.call = begin(Call::kAllGather, total(counts), dtype);
    const bool is_small = *std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes;
    meet(envelope, is_small ? at(input) : nullptr, equal_counts(counts.at(own)), counts, item);
    copy_bytes(bytes + offsets[own] * item, input, counts[own] * item);
    std::vector<GlooMesh::Transfer> transfers;
    for (size_t r = 0; r < counts.size(); ++r) {
      if (is_small && r != own) {
        copy_bytes(bytes + offsets[r] * item, received_[r].payload, counts[r] * item);
      } else if (r != own) {
        start_send(input, counts[own] * item, r, SlotKind::kData, transfers);
        start_receive(bytes + offsets[r] * item, counts[r] * item, r, SlotKind::kData, transfers);
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
    const size_t own = self();
    Envelope envelope;
    envelope.call = begin(Call::kAllToAll, 0, dtype);
    meet(envelope, nullptr, send_counts, recv_counts, item);
    require_count(own, send_counts.at(own), recv_counts.at(own));
    copy_bytes(
        to + recv_offsets[own] * item, from + send_offsets[own] * item, recv_counts[own] * item);
    std::vector<GlooMesh::Transfer> transfers;
    for (size_t r = 0; r < size(); ++r) {
      if (r != own) {
        start_send(
            from + send_offsets[r] * item, send_counts[r] * item, r, SlotKind::kData, transfers);
        start_receive(
            to + recv_offsets[r] * item, recv_counts[r] * item, r, SlotKind::kData, transfers);
      }
    }
    wait(transfers);
    end();
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    const size_t source = static_cast<size_t>(root);
    Envelope envelope;
    envelope.call = begin(Call::kBroadcast, bytes, DType::kUInt8);
    envelope.call.root = root;
    const int64_t sends = rank() == root ? bytes : 0;
    std::vector<int64_t> counts(size(), 0);
    counts.at(source) = bytes;
    const bool is_small = bytes <= kInlineBytes;
    meet(envelope, is_small ? at(data) : nullptr, equal_counts(sends), counts, 1);
    std::vector<GlooMesh::Transfer> transfers;
    if (is_small && rank() != root) {
      copy_bytes(data, received_[source].payload, bytes);
    } else if (!is_small && rank() != root) {
      start_receive(data, bytes, source, SlotKind::kData, transfers);
    } else if (!is_small) {
      for (size_t r = 0; r < size(); ++r) {
        if (r != source) {
          start_send(data, bytes, r, SlotKind::kData, transfers);
        }
      }
    }
    wait(transfers);
    end();
  }

  void barrier() override {
    Envelope envelope;
    envelope.call = begin(Call::kBarrier, 0, DType::kUInt8);
    meet(envelope, nullptr, equal_counts(0), equal_counts(0), 1);
    end();
  }

 private:
  using Source = std::function<const void*(size_t rank)>;  // payload for a rank

  uint64_t slot(SlotKind kind, int tag = 0) const {
    return (static_cast<uint64_t>(number()) << 36) | (static_cast<uint64_t>(kind) << 32) |
           static_cast<uint32_t>(tag);
  }

  void post(const void* data, int64_t bytes, int peer, int tag) override {
    MessageHeader header;
    header.bytes = bytes;
    const bool is_short = bytes <= kInlineBytes;
    copy_bytes(header.payload, data, is_short ? bytes : 0);
    const int to = member(static_cast<size_t>(peer));
    const auto enqueue = [&](const void* from, int64_t size, SlotKind kind) {
      const std::byte* first = static_cast<const std::byte*>(from);
      mesh().post({first, first + size}, to, slot(kind, tag));
    };
    enqueue(&header, sizeof(header), SlotKind::kMessage);
    if (!is_short) {
      enqueue(data, bytes, SlotKind::kMessageData);
    }
  }

  int64_t take(void* data, int64_t bytes, int peer, int tag) override {
    const int from = member(static_cast<size_t>(peer));
    const auto until = deadline();
    MessageHeader header;
    mesh().wait(mesh().receive(&header, sizeof(header), from, slot(SlotKind::kMessage, tag)),
                doing(),
                until);
    if (header.bytes == bytes && bytes > kInlineBytes) {
      mesh().wait(
          mesh().receive(data, bytes, from, slot(SlotKind::kMessageData, tag)), doing(), until);
    } else {
      copy_bytes(data, header.payload, std::min({header.bytes, bytes, kInlineBytes}));
    }
    return header.bytes;
  }

  std::vector<int64_t> equal_counts(int64_t count) const {
    return std::vector<int64_t>(size(), count);
  }
  static Source at(const void* data) {
    return [data](size_t) { return data; };
  }
  void start_send(const void* data,
                  int64_t bytes,
                  size_t r,
                  SlotKind kind,
                  std::vector<GlooMesh::Transfer>& transfers) {
    if (bytes > 0) {
      transfers.push_back(mesh().send(data, bytes, member(r), slot(kind)));
    }
  }
  void start_receive(void* data,
                     int64_t bytes,
                     size_t r,
                     SlotKind kind,
                     std::vector<GlooMesh::Transfer>& transfers) {
    if (bytes > 0) {
      transfers.push_back(mesh().receive(data, bytes, member(r), slot(kind)));
    }
  }
  void wait(const std::vector<GlooMesh::Transfer>& transfers) {
    const auto until = deadline();
    for (const GlooMesh::Transfer& transfer : transfers) {
      mesh().wait(transfer, doing(), until);
    }
  }

  // Exchanges envelopes; with `source` they carry payloads. sends[r] elements go to rank r, and
  // recv_counts[r] are expected from it.
  void meet(const Envelope& envelope,
            const Source& source,
            const std::vector<int64_t>& sends,
            const std::vector<int64_t>& recv_counts,
            int64_t item) {
    sent_.assign(size(), envelope);
    received_.resize(size());
    std::vector<GlooMesh::Transfer> receives, others;
    for (size_t r = 0; r < size(); ++r) {
      if (r != self()) {
        start_receive(&received_[r], sizeof(Envelope), r, SlotKind::kHeader, receives);
      }
    }
    for (size_t r = 0; r < size(); ++r) {
      if (r != self()) {
        sent_[r].sends = sends[r];
        copy_bytes(sent_[r].payload, source ? source(r) : nullptr, source ? sends[r] * item : 0);
        start_send(&sent_[r], sizeof(Envelope), r, SlotKind::kHeader, others);
      }
    }
    wait(receives);
    wait(others);
    for (size_t r = 0; r < size(); ++r) {
      if (r != self()) {
        require_same_call(r, envelope.call, received_[r].call);
        require_count(r, received_[r].sends, recv_counts.at(r));
      }
    }
  }

  // The payloads of all ranks, this one's own being `own`.
  std::vector<const void*> payloads(const void* own) const {
    std::vector<const void*> inputs;
    for (const Envelope& envelope : received_) {
      inputs.push_back(envelope.payload);
    }
    inputs[self()] = own;
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
    const size_t own = self(), n = size();
    const int64_t piece = std::min(kLargestPiece, kScratchBytes / static_cast<int64_t>(n)) / item;
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    scratch_.resize(n * static_cast<size_t>(std::min(piece, longest) * item));
    for (int64_t at = 0; at < longest; at += piece) {
      const auto part = [&](size_t r) { return std::clamp<int64_t>(counts[r] - at, 0, piece); };
      std::vector<GlooMesh::Transfer> receives, others;
      std::vector<const void*> inputs(n);
      for (size_t r = 0; r < n; ++r) {
        std::byte* room =
            scratch_.data() + static_cast<int64_t>(r) * std::min(piece, longest) * item;
        inputs[r] = r == own ? input + (offsets[r] + at) * item : room;
        if (r != own) {
          start_receive(room, part(own) * item, r, SlotKind::kData, receives);
          start_send(input + (offsets[r] + at) * item, part(r) * item, r, SlotKind::kData, others);
        }
      }
      wait(receives);
      std::byte* result = static_cast<std::byte*>(output) + at * item;
      reduce_in_order(inputs, {result}, 0, part(own), dtype, reduction);
      for (size_t r = 0; r < n && everywhere != nullptr; ++r) {
        if (r != own) {
          std::byte* place = everywhere + (offsets[r] + at) * item;
          start_send(result, part(own) * item, r, SlotKind::kResult, others);
          start_receive(place, part(r) * item, r, SlotKind::kResult, others);
        }
      }
      wait(others);
    }
  }

  std::vector<Envelope> sent_, received_;
  std::vector<std::byte> scratch_;
};

}  // namespace

std::unique_ptr<Communicator> make_process_communicator(ProcessGroup group) {
  auto network = std::make_unique<GlooCommunicator>(group);
  std::unique_ptr<Communicator> shared = make_shared_communicator(group, *network);
  return shared ? std::move(shared) : std::move(network);
}

std::unique_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Rendezvous> rendezvous,
                                                     bool may_share_memory) {
  ProcessGroup group;
  for (int rank = 0; rank < rendezvous->world_size(); ++rank) {
    group.members.push_back(rank);
  }
  group.rank = rendezvous->rank();
  group.next_number = std::make_shared<int64_t>(1);
  group.may_share_memory = may_share_memory;
  group.mesh = std::make_shared<GlooMesh>(std::move(rendezvous));
  return make_process_communicator(std::move(group));
}

}  // namespace trainrt
