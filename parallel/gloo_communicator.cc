// A collective begins with an envelope from every rank to every other: what it calls, and how many
// elements follow. Differences are found before any data moves, and a payload that fits comes
// along, so that scalars need one round. Larger ones go directly between the ranks concerned, in
// pieces: rank r collects piece after piece of segment r from all ranks, sums in rank order and, in
// all_reduce, sends the result to all.
#include "parallel/gloo_communicator.h"

#include <algorithm>
#include <array>
#include <functional>

#include "parallel/process_communicator.h"
#include "parallel/reduce_in_order.h"
#include "parallel/shared_communicator.h"
#include "parallel/strip.h"

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

  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;

  void all_reduce(const std::vector<WholeTensor>& tensors,
                  DType dtype,
                  ReductionKind reduction) override {
    const int64_t item = dtype_bytes(dtype);
    const Strip data = strip_of(tensors, item);
    const int64_t count = data.bytes() / item;
    Envelope envelope;
    envelope.call = begin(Call::kAllReduce, count, dtype, tensors.size());
    envelope.call.reduction = static_cast<int32_t>(reduction);
    if (data.bytes() <= kInlineBytes) {
      Inline own;
      data.read(0, data.bytes(), own.data());
      meet(envelope, at(own.data()), equal_counts(count), equal_counts(count), item);
      reduce_in_order(payloads(own.data()), {own.data()}, 0, count, dtype, reduction);
      data.write(0, data.bytes(), own.data());
    } else {
      meet(envelope, nullptr, equal_counts(count), equal_counts(count), item);
      const std::vector<int64_t> counts = even_segments(count, world_size());
      reduce_pieces(data, data, offsets_of(counts)[self()] * item, counts, dtype, reduction, true);
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
    const std::vector<int64_t> offsets = offsets_of(counts);
    const int64_t own = counts.at(self());
    Envelope envelope;
    envelope.call = begin(Call::kReduceScatter, total(counts), dtype, tensors.size());
    envelope.call.reduction = static_cast<int32_t>(reduction);
    if (*std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes) {
      std::vector<Inline> segments(size());
      for (size_t r = 0; r < size(); ++r) {
        input.read(offsets[r] * item, counts[r] * item, segments[r].data());
      }
      const Source segment = [&](size_t r) { return segments[r].data(); };
      meet(envelope, segment, counts, equal_counts(own), item);
      std::byte* sum = segments[self()].data();
      reduce_in_order(payloads(sum), {sum}, 0, own, dtype, reduction);
      output.write(0, own * item, sum);
    } else {
      meet(envelope, nullptr, counts, equal_counts(own), item);
      reduce_pieces(input, output, 0, counts, dtype, reduction, false);
    }
    end();
  }

  void all_gather(const std::vector<CutTensor>& tensors, DType dtype) override {
    const int64_t item = dtype_bytes(dtype);
    const Strip input = segments_of(tensors, self(), item, true);
    const Strip output = wholes_of(tensors, item, false);
    const std::vector<int64_t> counts = counts_of(tensors, size());
    const std::vector<int64_t> offsets = offsets_of(counts);
    const size_t own = self();
    Envelope envelope;
    envelope.call = begin(Call::kAllGather, total(counts), dtype, tensors.size());
    const bool is_small = *std::max_element(counts.begin(), counts.end()) * item <= kInlineBytes;
    // What lies in pieces is packed on both sides.
    const std::byte* segment = input.find(0, input.bytes());
    if (segment == nullptr) {
      packed_.resize(static_cast<size_t>(input.bytes()));
      input.read(0, input.bytes(), packed_.data());
      segment = packed_.data();
    }
    meet(envelope, is_small ? at(segment) : nullptr, equal_counts(counts[own]), counts, item);
    output.write(offsets[own] * item, counts[own] * item, segment);
    scratch_.resize(output.is_one_piece() || is_small ? 0 : static_cast<size_t>(output.bytes()));
    std::vector<GlooMesh::Transfer> transfers;
    for (size_t r = 0; r < counts.size(); ++r) {
      const int64_t begins = offsets[r] * item, bytes = counts[r] * item;
      if (is_small && r != own) {
        output.write(begins, bytes, received_[r].payload);
      } else if (r != own) {
        std::byte* place = scratch_.empty() ? output.find(begins, bytes) : scratch_.data() + begins;
        start_send(segment, input.bytes(), r, SlotKind::kData, transfers);
        start_receive(place, bytes, r, SlotKind::kData, transfers);
      }
    }
    wait(transfers);
    for (size_t r = 0; r < counts.size() && !scratch_.empty(); ++r) {
      const int64_t begins = offsets[r] * item;
      output.write(begins, r == own ? 0 : counts[r] * item, scratch_.data() + begins);
    }
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
    envelope.call = begin(Call::kBroadcast, bytes, DType::kUInt8, source);
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
  using Inline = std::array<std::byte, kInlineBytes>;

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

  // Segment r of all ranks' `input`, reduced, into rank r's `output` from byte `output_at` on;
  // then, when `everywhere`, to all ranks at its place in there. The pieces of a segment that this
  // rank has sent are not needed any more when the reduced piece arrives, so `output` may be the
  // input, and where a piece was packed the result may come.
  void reduce_pieces(const Strip& input,
                     const Strip& output,
                     int64_t output_at,
                     const std::vector<int64_t>& counts,
                     DType dtype,
                     ReductionKind reduction,
                     bool everywhere) {
    const int64_t item = dtype_bytes(dtype);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const size_t own = self(), n = size();
    const bool packs = !input.is_one_piece() || !output.is_one_piece();
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    const int64_t piece =
        std::min({kLargestPiece / item, kScratchBytes / static_cast<int64_t>(n) / item, longest});
    const auto room = [&](std::vector<std::byte>& rooms, size_t r) {
      return rooms.data() + static_cast<int64_t>(r) * piece * item;
    };
    scratch_.resize(n * static_cast<size_t>(piece * item));
    packed_.resize(packs ? scratch_.size() : 0);
    for (int64_t at = 0; at < longest; at += piece) {
      const auto bytes = [&](size_t r) {
        return std::clamp<int64_t>(counts[r] - at, 0, piece) * item;
      };
      const auto begins = [&](size_t r) { return (offsets[r] + at) * item; };
      std::vector<GlooMesh::Transfer> receives, others;
      std::vector<const void*> inputs(n);
      for (size_t r = 0; r < n; ++r) {
        const std::byte* from = packs ? room(packed_, r) : input.find(begins(r), bytes(r));
        if (packs) {
          input.read(begins(r), bytes(r), room(packed_, r));
        }
        inputs[r] = r == own ? from : room(scratch_, r);
        if (r != own) {
          start_receive(room(scratch_, r), bytes(own), r, SlotKind::kData, receives);
          start_send(from, bytes(r), r, SlotKind::kData, others);
        }
      }
      wait(receives);
      const int64_t to = output_at + at * item;
      std::byte* result = packs ? room(scratch_, own) : output.find(to, bytes(own));
      reduce_in_order(inputs, {result}, 0, bytes(own) / item, dtype, reduction);
      output.write(to, bytes(own), result);
      for (size_t r = 0; r < n && everywhere; ++r) {
        if (r != own) {
          std::byte* place = packs ? room(packed_, r) : output.find(begins(r), bytes(r));
          start_send(result, bytes(own), r, SlotKind::kResult, others);
          start_receive(place, bytes(r), r, SlotKind::kResult, others);
        }
      }
      wait(others);
      for (size_t r = 0; r < n && everywhere && packs; ++r) {
        output.write(begins(r), r == own ? 0 : bytes(r), room(packed_, r));
      }
    }
  }

  std::vector<Envelope> sent_, received_;
  std::vector<std::byte> scratch_, packed_;
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
