// One communicator of NCCL for collectives, and one of two ranks for each channel of messages: a
// send that its peer has not received keeps its stream waiting, so messages that come in different
// orders on the two sides, or go in different directions, need streams of their own.
//
// A tensor is copied before it is sent, so that computation may overwrite it at once: were it sent
// from where it lies, two stages that exchange tensors would each wait to overwrite one until the
// other has come to receive it, and neither would. As many copies can be on their way as it takes
// for the ranks, in the order of their messages, never to wait for each other for want of one. They
// lie in the room that the memory plan has for them; should an order need more, in memory of this.
#include "parallel/nccl_communicator.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/base/cuda_check.h"
#include "graph/base/log.h"
#include "graph/cuda_handle.h"
#include "parallel/assign_offsets.h"
#include "parallel/communicator_memory.h"
#include "parallel/message_lanes.h"
#include "parallel/nccl_links.h"

namespace trainrt {

namespace {

ncclDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    case DType::kUInt32:
      return ncclUint32;
    case DType::kUInt64:
      return ncclUint64;
    case DType::kInt8:
      return ncclInt8;
    case DType::kUInt8:
    case DType::kBool:
      return ncclUint8;
    default:
      TRAINRT_FAIL(kUnsupported, "NCCL does not know ", dtype_name(dtype));
  }
}

ncclRedOp_t operation(ReductionKind kind) {
  return kind == ReductionKind::kMax ? ncclMax : kind == ReductionKind::kMin ? ncclMin : ncclSum;
}

// The channels from one rank to another, among those of the sender.
struct PlannedChannels {
  int from = 0, to = 0;
  std::map<int, int> lanes;      // of tags
  std::map<int, int64_t> bytes;  // of tags: the largest message
  int first = 0, count = 0;
};

PlannedChannels plan_channels(const std::vector<std::vector<Message>>& of_ranks, int from, int to) {
  PlannedChannels planned;
  planned.from = from;
  planned.to = to;
  const auto tags = [&](int rank, int peer, bool sends) {
    std::vector<int> found;
    for (const Message& message : of_ranks[static_cast<size_t>(rank)]) {
      if (message.peer == peer && message.sends == sends) {
        found.push_back(message.tag);
        int64_t& bytes = planned.bytes[message.tag];
        bytes = std::max(bytes, message.bytes);
      }
    }
    return found;
  };
  planned.lanes = share_lanes(tags(from, to, true), tags(to, from, false));
  for (const auto& [tag, lane] : planned.lanes) {
    planned.count = std::max(planned.count, lane + 1);
  }
  return planned;
}

// Those of all senders, in the order in which all ranks make them.
std::vector<PlannedChannels> plan_channels(const std::vector<std::vector<Message>>& of_ranks) {
  const int num_ranks = static_cast<int>(of_ranks.size());
  std::vector<PlannedChannels> planned;
  for (int from = 0; from < num_ranks; ++from) {
    int first = 0;
    for (int to = 0; to < num_ranks; ++to) {
      PlannedChannels channels = plan_channels(of_ranks, from, to);
      if (from != to && channels.count > 0) {
        channels.first = first;
        first += channels.count;
        planned.push_back(std::move(channels));
      }
    }
  }
  return planned;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(Communicator& group,
                   std::unique_ptr<Communicator> owned_group,
                   const NcclPlace& place)
      : owned_group_(std::move(owned_group)),
        group_(group),
        rank_(group.rank()),
        world_size_(group.world_size()),
        place_(place),
        stream_(place.stream),
        links_(group, place.device, place.deadline) {
    TRAINRT_CUDA_CHECK(cudaSetDevice(place.device));
    ncclUniqueId id{};
    if (rank_ == 0) {
      id = new_id();
    }
    group.broadcast(&id, sizeof(id), 0);
    TRAINRT_CUDA_CHECK(cudaMalloc(words_.put(), kNumWords * sizeof(int32_t)));
    TRAINRT_CUDA_CHECK(cudaMemsetAsync(words_.get(), 0, kNumWords * sizeof(int32_t), stream_));
    links_.join(stream_, world_size_, id, rank_);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;

  // NCCL makes one launch of the calls of a group, so a bucket is never packed.
  void all_reduce(const std::vector<WholeTensor>& tensors,
                  DType dtype,
                  ReductionKind reduction) override {
    const ncclDataType_t type = data_type(dtype);
    run_group("all_reduce", [&](ncclComm_t comm, FirstRefusal& refusal) {
      for (const WholeTensor& tensor : tensors) {
        refusal.note(ncclAllReduce(tensor.data,
                                   tensor.data,
                                   size(tensor.count),
                                   type,
                                   operation(reduction),
                                   comm,
                                   stream_));
      }
    });
  }

  void reduce_scatter(const std::vector<CutTensor>& tensors,
                      DType dtype,
                      ReductionKind reduction) override {
    const ncclDataType_t type = data_type(dtype);
    run_group("reduce_scatter", [&](ncclComm_t comm, FirstRefusal& refusal) {
      for (const CutTensor& tensor : tensors) {
        if (equal(tensor.counts)) {
          refusal.note(ncclReduceScatter(tensor.input,
                                         tensor.output,
                                         size(tensor.counts[0]),
                                         type,
                                         operation(reduction),
                                         comm,
                                         stream_));
          continue;
        }
        // Uneven: one reduction per segment, to the rank that owns it.
        const std::byte* segment = static_cast<const std::byte*>(tensor.input);
        for (int r = 0; r < world_size_; ++r) {
          const int64_t count = tensor.counts[size(r)];
          refusal.note(ncclReduce(segment,
                                  r == rank_ ? tensor.output : nullptr,
                                  size(count),
                                  type,
                                  operation(reduction),
                                  r,
                                  comm,
                                  stream_));
          segment += count * dtype_bytes(dtype);
        }
      }
    });
  }

  void all_gather(const std::vector<CutTensor>& tensors, DType dtype) override {
    const ncclDataType_t type = data_type(dtype);
    run_group("all_gather", [&](ncclComm_t comm, FirstRefusal& refusal) {
      for (const CutTensor& tensor : tensors) {
        if (equal(tensor.counts)) {
          refusal.note(ncclAllGather(
              tensor.input, tensor.output, size(tensor.counts[0]), type, comm, stream_));
          continue;
        }
        std::byte* segment = static_cast<std::byte*>(tensor.output);
        for (int r = 0; r < world_size_; ++r) {
          const int64_t count = tensor.counts[size(r)];
          refusal.note(ncclBroadcast(
              r == rank_ ? tensor.input : segment, segment, size(count), type, r, comm, stream_));
          segment += count * dtype_bytes(dtype);
        }
      }
    });
  }

  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    const ncclDataType_t type = data_type(dtype);
    run_group("all_to_all", [&](ncclComm_t comm, FirstRefusal& refusal) {
      const std::byte* from = static_cast<const std::byte*>(input);
      std::byte* to = static_cast<std::byte*>(output);
      for (int r = 0; r < world_size_; ++r) {
        const int64_t sent = send_counts[static_cast<size_t>(r)];
        const int64_t received = recv_counts[static_cast<size_t>(r)];
        refusal.note(ncclSend(from, size(sent), type, r, comm, stream_));
        refusal.note(ncclRecv(to, size(received), type, r, comm, stream_));
        from += sent * dtype_bytes(dtype);
        to += received * dtype_bytes(dtype);
      }
    });
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    run("broadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(data, data, size(bytes), ncclUint8, root, comm, stream_);
    });
  }

  // NCCL matches sends and receives of a channel by their order, whatever their tags.
  void send(const void* data, int64_t bytes, int peer, int tag) override {
    if (peer == rank_) {
      keep(data, bytes, tag);
      return;
    }
    Channel& channel = channel_of({peer, tag, true});
    CopiedMessage& copied = channel.copies[channel.next];
    channel.next = (channel.next + 1) % channel.copies.size();
    const cudaStream_t lane = links_.stream(channel.link);
    if (copied.used) {
      TRAINRT_CUDA_CHECK(cudaStreamWaitEvent(stream_, copied.sent.get(), 0));
    }
    copy(copied.slot, data, bytes);
    TRAINRT_CUDA_CHECK(cudaEventRecord(copied.ready.get(), stream_));
    TRAINRT_CUDA_CHECK(cudaStreamWaitEvent(lane, copied.ready.get(), 0));
    send_on(channel, copied.slot, bytes, peer);
    TRAINRT_CUDA_CHECK(cudaEventRecord(copied.sent.get(), lane));
    copied.used = true;
  }
  void recv(void* data, int64_t bytes, int peer, int tag) override {
    if (peer == rank_) {
      take_kept(data, bytes, tag);
      return;
    }
    const Channel& channel = channel_of({peer, tag, false});
    links_.run(
        channel.link, concat("recv of ", bytes, " bytes of rank ", peer), [&](ncclComm_t comm) {
          return ncclRecv(data, size(bytes), ncclUint8, 0, comm, links_.stream(channel.link));
        });
  }

  Lane lane_of(const Message& message) const override {
    const bool copied = message.sends || message.peer == rank_;
    return copied ? Lane::kCommunication : channel_of(message).lane;
  }

  // All ranks make the channels in one order, and the sender of each names it.
  void expect_messages(const std::vector<Message>& messages) override {
    const std::vector<std::vector<Message>> of_ranks = exchange(messages);
    const std::vector<PlannedChannels> planned = plan_channels(of_ranks);
    std::map<std::pair<int, int>, std::span<std::byte>> rooms;  // by peer, tag
    std::map<int, int64_t> to_self;                             // by tag: bytes
    for (const Message& message : messages) {
      if (message.sends) {
        rooms[{message.peer, message.tag}] = message.room;
        if (message.peer == rank_) {
          to_self[message.tag] = std::max(to_self[message.tag], message.bytes);
        }
      }
    }
    for (const auto& [tag, bytes] : to_self) {
      free_slots_[tag] = slots(rooms[{rank_, tag}], bytes);
    }
    int last = static_cast<int>(Lane::kCommunication);  // of this device's lanes
    const CopiesOfMessages copies = copies_on_way(of_ranks, kCopiesOnWay)[size(rank_)];
    int most = 0, mine = 0;  // of one sender, of this one
    for (const PlannedChannels& plan : planned) {
      most = std::max(most, plan.first + plan.count);
      mine = plan.from == rank_ ? std::max(mine, plan.first + plan.count) : mine;
    }
    // Each identifier that is made keeps a socket and a thread until the process ends.
    std::vector<ncclUniqueId> own(size(most)), all(own.size() * size(world_size_));
    std::generate_n(own.begin(), mine, new_id);
    const int64_t bytes = static_cast<int64_t>(own.size() * sizeof(ncclUniqueId));
    group_.all_gather(
        own.data(), all.data(), std::vector<int64_t>(size(world_size_), bytes), DType::kUInt8);
    for (const PlannedChannels& plan : planned) {
      const bool sends = plan.from == rank_;
      if (!sends && plan.to != rank_) {
        continue;
      }
      std::vector<std::pair<size_t, Lane>> made;
      for (int i = 0; i < plan.count; ++i) {
        const auto [lane, stream] = place_.add_lane();
        const ncclUniqueId& id = all[size(plan.from * most + plan.first + i)];
        last = static_cast<int>(lane);
        made.emplace_back(links_.join(stream, 2, id, sends ? 0 : 1, kMessageBlocks), lane);
        connect(made.back().first, sends);
      }
      for (const auto& [tag, lane] : plan.lanes) {
        Channel channel;
        std::tie(channel.link, channel.lane) = made[size(lane)];
        channel.copies.resize(sends ? size(copies.at({plan.to, tag})) : 0);
        const int64_t bytes_of_tag = plan.bytes.at(tag);
        std::vector<void*> planned_slots =
            sends ? slots(rooms[{plan.to, tag}], bytes_of_tag) : std::vector<void*>();
        for (CopiedMessage& copied : channel.copies) {
          copied.slot = take_slot(planned_slots, bytes_of_tag);
          for (cuda::Event* event : {&copied.ready, &copied.sent}) {
            TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(event->put(), cudaEventDisableTiming));
          }
        }
        channels_[{sends ? plan.to : plan.from, tag, sends}] = std::move(channel);
      }
    }
    if (last >= kMostLanes) {
      log_warning("rank ",
                  rank_,
                  " has ",
                  last + 1,
                  " lanes for computation, collectives and messages, and CUDA keeps ",
                  kMostLanes,
                  " apart: messages that wait for a peer may hold up others, until --deadline ends "
                  "the run if they wait for each other; fewer --virtual-stages need fewer");
    }
  }

  void barrier() override {
    all_reduce(words_.get(), 1, DType::kInt32, ReductionKind::kMax);
    TRAINRT_CUDA_CHECK(cudaStreamSynchronize(stream_));
    links_.throw_failure();
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    links_.throw_failure();
    std::unique_ptr<Communicator> part = group_.split(color, key);
    Communicator& group = *part;
    return std::make_unique<NcclCommunicator>(group, std::move(part), place_);
  }

  // Told first: giving up waits for this device's other kernels, those of other communicators among
  // them, which end when their watchers learn of the failure.
  void abort(const std::string& reason) noexcept override {
    group_.abort(reason);
    links_.give_up(reason);
  }

  std::string failure() const override { return links_.failure(); }

 private:
  struct CopiedMessage {
    void* slot = nullptr;
    cuda::Event ready, sent;
    bool used = false;
  };
  struct Channel {
    size_t link = 0;
    Lane lane = Lane::kCommunication;
    std::vector<CopiedMessage> copies;  // of those that this rank sends
    size_t next = 0;
  };
  struct Kept {
    void* slot = nullptr;
    int64_t bytes = 0;
  };

  static size_t size(int64_t count) { return static_cast<size_t>(count); }
  static bool equal(const std::vector<int64_t>& counts) {
    return std::all_of(
        counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
  }
  static ncclUniqueId new_id() {
    ncclUniqueId id{};
    const ncclResult_t result = ncclGetUniqueId(&id);
    TRAINRT_REQUIRE(result == ncclSuccess,
                    kCommunication,
                    "ncclGetUniqueId failed (NCCL): ",
                    ncclGetErrorString(result));
    return id;
  }

  // A collective of the whole group.
  void run(const char* name, const std::function<ncclResult_t(ncclComm_t)>& fn) {
    links_.run(0, name, fn);
  }

  // Several calls that make progress together.
  void run_group(const char* name, const std::function<void(ncclComm_t, FirstRefusal&)>& fn) {
    run(name, [&](ncclComm_t comm) {
      FirstRefusal refusal;
      refusal.note(ncclGroupStart());
      if (refusal.result == ncclSuccess) {
        fn(comm, refusal);
        const ncclResult_t ended = ncclGroupEnd();
        return refusal.result == ncclSuccess ? ended : refusal.result;
      }
      return refusal.result;
    });
  }

  const Channel& channel_of(const Message& message) const {
    const auto at = channels_.find({message.peer, message.tag, message.sends});
    TRAINRT_CHECK(at != channels_.end(),
                  "message ",
                  message.tag,
                  message.sends ? " to" : " of",
                  " rank ",
                  message.peer,
                  " was not expected");
    return at->second;
  }
  Channel& channel_of(const Message& message) {
    return const_cast<Channel&>(std::as_const(*this).channel_of(message));
  }

  // A first message that means nothing. NCCL connects two ranks when they first exchange something,
  // and neither call returns before both have been made: were that a message of the step, ranks
  // whose messages come in different orders would wait for each other.
  void connect(size_t link, bool sends) {
    void* word = static_cast<int32_t*>(words_.get()) + 1;
    links_.run(link, "connecting to a peer", [&](ncclComm_t comm) {
      const cudaStream_t lane = links_.stream(link);
      return sends ? ncclSend(word, 1, ncclInt32, 1, comm, lane)
                   : ncclRecv(word, 1, ncclInt32, 0, comm, lane);
    });
  }

  void send_on(const Channel& channel, const void* data, int64_t bytes, int peer) {
    links_.run(
        channel.link, concat("send of ", bytes, " bytes to rank ", peer), [&](ncclComm_t comm) {
          return ncclSend(data, size(bytes), ncclUint8, 1, comm, links_.stream(channel.link));
        });
  }

  std::vector<std::vector<Message>> exchange(const std::vector<Message>& messages) {
    const int64_t own_count = static_cast<int64_t>(messages.size());
    std::vector<int64_t> counts(size(world_size_)), own;
    group_.all_gather(
        &own_count, counts.data(), std::vector<int64_t>(counts.size(), 1), DType::kInt64);
    for (const Message& m : messages) {
      own.insert(own.end(), {m.peer, m.tag, m.sends, m.bytes});
    }
    constexpr int64_t kWords = 4;  // of a message
    std::vector<int64_t> word_counts;
    for (const int64_t count : counts) {
      word_counts.push_back(kWords * count);
    }
    std::vector<int64_t> words(
        size(std::accumulate(word_counts.begin(), word_counts.end(), int64_t{0})));
    group_.all_gather(own.data(), words.data(), word_counts, DType::kInt64);
    std::vector<std::vector<Message>> all(counts.size());
    auto word = words.begin();
    for (size_t r = 0; r < counts.size(); ++r) {
      for (int64_t i = 0; i < counts[r]; ++i, word += kWords) {
        all[r].push_back(
            {static_cast<int>(word[0]), static_cast<int>(word[1]), word[2] != 0, word[3]});
      }
    }
    return all;
  }

  // ---- messages to this rank itself: copies that wait to be taken
  // --------------------------------

  void keep(const void* data, int64_t bytes, int tag) {
    links_.throw_failure();
    const Kept message{take_slot(free_slots_[tag], bytes), bytes};
    copy(message.slot, data, bytes);
    to_self_[tag].push_back(message);
  }

  void take_kept(void* data, int64_t bytes, int tag) {
    links_.throw_failure();
    std::deque<Kept>& messages = to_self_[tag];
    TRAINRT_CHECK(!messages.empty() && messages.front().bytes == bytes,
                  "message ",
                  tag,
                  " of rank ",
                  rank_,
                  " to itself");
    copy(data, messages.front().slot, bytes);
    free_slots_[tag].push_back(messages.front().slot);
    messages.pop_front();
  }

  // Places for copies of `bytes` each.
  static std::vector<void*> slots(std::span<std::byte> room, int64_t bytes) {
    const size_t step = std::max<size_t>(size(OffsetAssigner::align(bytes)), 1);
    std::vector<void*> found;
    for (size_t at = 0; at + step <= room.size(); at += step) {
      found.push_back(room.data() + at);
    }
    return found;
  }

  // One of `slots`, which it leaves, or new memory when there is none.
  void* take_slot(std::vector<void*>& slots, int64_t bytes) {
    if (!slots.empty()) {
      void* slot = slots.back();
      slots.pop_back();
      return slot;
    }
    TRAINRT_CUDA_CHECK(
        cudaMalloc(unplanned_.emplace_back().put(), std::max<size_t>(size(bytes), 1)));
    return unplanned_.back().get();
  }

  void copy(void* to, const void* from, int64_t bytes) {
    TRAINRT_CUDA_CHECK(cudaMemcpyAsync(to, from, size(bytes), cudaMemcpyDeviceToDevice, stream_));
  }

  std::unique_ptr<Communicator> owned_group_;  // of a part: what `group_` names
  Communicator& group_;
  int rank_, world_size_;
  NcclPlace place_;
  cudaStream_t stream_;
  // For the barrier, and what channels connect with.
  static constexpr size_t kNumWords = 2;
  cuda::Memory words_;
  std::map<std::tuple<int, int, bool>, Channel> channels_;  // by peer, tag, whether it is sent
  std::map<int, std::deque<Kept>> to_self_;                 // by tag
  std::map<int, std::vector<void*>> free_slots_;            // of those, by tag
  std::deque<cuda::Memory> unplanned_;                      // of copies beside the planned room
  NcclLinks links_;  // closed first: memory is freed when nothing waits any more
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& group, const NcclPlace& place) {
  return std::make_unique<NcclCommunicator>(group, nullptr, place);
}

}  // namespace trainrt
