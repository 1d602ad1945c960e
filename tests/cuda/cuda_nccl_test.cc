// The NCCL communicator on the double: ranks are threads, each with a device. It passes the suite
// of all communicators, and what is its own: calls that return before they have taken place.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>

#include "graph/base/log.h"
#include "parallel/message_lanes.h"
#include "parallel/nccl_communicator.h"
#include "parallel/thread_communicator.h"
#include "runtime/device.h"
#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/parallel/communicator_suite.h"

namespace trainrt {
namespace {

// A rank's device and communicator for tensors in the host's memory: they go to the device and come
// back, which waits for the call.
class HostRank : public Communicator {
 public:
  HostRank(std::unique_ptr<Communicator> world, std::chrono::milliseconds deadline)
      : world_(std::move(world)), device_(make(world_->rank(), deadline)) {
    owned_ = device_->make_communicator(*world_);
    own_ = owned_.get();
  }
  HostRank(const HostRank& whole, std::unique_ptr<Communicator> part)
      : device_(whole.device_), owned_(std::move(part)), own_(owned_.get()) {}

  Communicator& communicator() { return *own_; }
  Communicator& world() { return *world_; }
  Device& device() { return *device_; }
  int rank() const override { return own_->rank(); }
  int world_size() const override { return own_->world_size(); }

  void all_reduce(const std::vector<WholeTensor>& tensors,
                  DType dtype,
                  ReductionKind reduction) override {
    std::vector<WholeTensor> there = tensors;
    for (WholeTensor& tensor : there) {
      tensor.data = put(tensor.data, tensor.count * dtype_bytes(dtype));
    }
    own_->all_reduce(there, dtype, reduction);
    for (size_t t = 0; t < tensors.size(); ++t) {
      get(tensors[t].data,
          static_cast<std::byte*>(there[t].data),
          tensors[t].count * dtype_bytes(dtype));
    }
  }
  void reduce_scatter(const std::vector<CutTensor>& tensors,
                      DType dtype,
                      ReductionKind reduction) override {
    std::vector<CutTensor> there = tensors;
    for (CutTensor& tensor : there) {
      tensor.input = put(tensor.input, bytes_of(tensor.counts, dtype));
      tensor.output = room(own(tensor.counts, dtype));
    }
    own_->reduce_scatter(there, dtype, reduction);
    for (size_t t = 0; t < tensors.size(); ++t) {
      get(tensors[t].output,
          static_cast<std::byte*>(there[t].output),
          own(tensors[t].counts, dtype));
    }
  }
  void all_gather(const std::vector<CutTensor>& tensors, DType dtype) override {
    std::vector<CutTensor> there = tensors;
    for (CutTensor& tensor : there) {
      tensor.input = put(tensor.input, own(tensor.counts, dtype));
      tensor.output = room(bytes_of(tensor.counts, dtype));
    }
    own_->all_gather(there, dtype);
    for (size_t t = 0; t < tensors.size(); ++t) {
      get(tensors[t].output,
          static_cast<std::byte*>(there[t].output),
          bytes_of(tensors[t].counts, dtype));
    }
  }
  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    std::byte* from = put(input, bytes_of(send_counts, dtype));
    std::byte* to = room(bytes_of(recv_counts, dtype));
    own_->all_to_all(from, send_counts, to, recv_counts, dtype);
    get(output, to, bytes_of(recv_counts, dtype));
  }
  void broadcast(void* data, int64_t bytes, int root) override {
    std::byte* there = put(data, bytes);
    own_->broadcast(there, bytes, root);
    get(data, there, bytes);
  }
  void send(const void* data, int64_t bytes, int peer, int tag) override {
    const Lane lane = own_->lane_of({peer, tag, true});
    std::byte* there = put(data, bytes, lane);
    own_->send(there, bytes, peer, tag);
  }
  void recv(void* data, int64_t bytes, int peer, int tag) override {
    const Lane lane = own_->lane_of({peer, tag, false});
    std::byte* there = room(bytes, lane);
    own_->recv(there, bytes, peer, tag);
    get(data, there, bytes, lane);
  }
  void barrier() override {
    device_->attach_thread();
    own_->barrier();
  }
  void expect_messages(const std::vector<Message>& messages) override {
    device_->attach_thread();
    own_->expect_messages(messages);
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    device_->attach_thread();
    return std::make_unique<HostRank>(*this, own_->split(color, key));
  }
  void abort(const std::string& reason) noexcept override { own_->abort(reason); }
  std::string failure() const override { return own_->failure(); }

  // Device memory of so many bytes, and that with what `data` holds; `lane` may use it.
  std::byte* room(int64_t bytes, Lane lane = Lane::kCommunication) {
    device_->attach_thread();
    buffers_.push_back(device_->allocate(std::max<int64_t>(bytes, 8)));
    device_->follow(lane, Lane::kCompute);
    return buffers_.back()->data();
  }
  std::byte* put(const void* data, int64_t bytes, Lane lane = Lane::kCommunication) {
    std::byte* there = room(bytes, lane);
    device_->copy_to_device(there, data, bytes);
    device_->follow(lane, Lane::kCompute);
    return there;
  }
  void get(void* data, const std::byte* there, int64_t bytes, Lane lane = Lane::kCommunication) {
    device_->follow(Lane::kCompute, lane);
    device_->copy_to_host(data, there, bytes);
    const std::string reason = failure();
    TRAINRT_REQUIRE(reason.empty(), kCommunication, reason);
  }

 private:
  static std::shared_ptr<Device> make(int rank, std::chrono::milliseconds deadline) {
    DeviceOptions options;
    options.deadline = deadline;
    return cuda_module().make_device(rank, options);
  }
  static int64_t bytes_of(const std::vector<int64_t>& counts, DType dtype) {
    int64_t sum = 0;
    for (const int64_t count : counts) {
      sum += count;
    }
    return sum * dtype_bytes(dtype);
  }
  int64_t own(const std::vector<int64_t>& counts, DType dtype) const {
    return counts.at(static_cast<size_t>(rank())) * dtype_bytes(dtype);
  }

  std::unique_ptr<Communicator> world_;
  std::shared_ptr<Device> device_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;  // as long as calls may be under way
  std::unique_ptr<Communicator> owned_;
  Communicator* own_ = nullptr;
};

std::vector<std::unique_ptr<Communicator>> make_nccl_ranks(int world_size,
                                                           std::chrono::milliseconds deadline) {
  cuda_double::reset({.num_devices = 4});
  // Those that only meet and tell of failures are patient.
  auto worlds = make_thread_communicators(world_size, std::chrono::seconds(60));
  std::vector<std::unique_ptr<Communicator>> ranks(worlds.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < worlds.size(); ++r) {
    threads.emplace_back(
        [&, r] { ranks[r] = std::make_unique<HostRank>(std::move(worlds[r]), deadline); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return ranks;
}

void expect_nothing_alive() {
  EXPECT_EQ(cuda_double::alive(), "");
}

const CommunicatorKind kNccl{"nccl", make_nccl_ranks, false, expect_nothing_alive};

INSTANTIATE_TEST_SUITE_P(Transport, CommunicatorTest, testing::Values(kNccl), kind_name);

HostRank& host_rank(Communicator& communicator) {
  return dynamic_cast<HostRank&>(communicator);
}

TEST(CudaNcclTest, ARankThatStaysAwayEndsTheWaitAtTheDeadline) {
  std::atomic<bool> over{false};
  const auto start = std::chrono::steady_clock::now();
  const auto errors =
      run_ranks(kNccl, 2, std::chrono::milliseconds(300), [&](Communicator& communicator) {
        HostRank& rank = host_rank(communicator);
        if (rank.rank() == 1) {
          while (!over) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          return;
        }
        const int64_t word = 1;
        int64_t got = 0;
        std::byte* there = rank.put(&word, sizeof(word));
        // Who reads waits for what never comes, until the communicator is aborted.
        try {
          rank.communicator().all_reduce(there, 1, DType::kInt64, ReductionKind::kSum);
          rank.get(&got, there, sizeof(got));
        } catch (...) {
          over = true;
          throw;
        }
        over = true;
      });
  EXPECT_THAT(errors[0], HasSubstr("all_reduce #0 did not end within 300 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Messages that are received in another order than they are sent, on their way all at once, and
// back; the host waits for nothing in between.
TEST(CudaNcclTest, MessagesCrossInAnyOrderWithoutAWait) {
  constexpr int kRounds = 12;
  constexpr int64_t kWord = sizeof(int64_t);
  const std::vector<int> there[] = {{1, 2, 3}, {3, 1, 2}}, back[] = {{5, 4}, {4, 5}};
  const auto value_of = [](int round, int tag) { return int64_t{100} * round + tag; };
  const auto errors = run_ranks(kNccl, 2, kPatient, [&](Communicator& communicator) {
    HostRank& rank = host_rank(communicator);
    const size_t r = static_cast<size_t>(rank.rank());
    const int peer = 1 - rank.rank();
    std::vector<Message> messages;
    for (int round = 0; round < kRounds; ++round) {
      for (const int tag : there[r]) {
        messages.push_back({peer, tag, r == 0, kWord});
      }
      for (const int tag : back[r]) {
        messages.push_back({peer, tag, r == 1, kWord});
      }
    }
    rank.expect_messages(messages);
    std::vector<std::pair<int64_t, std::byte*>> wanted;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& message = messages[i];
      const Lane lane = rank.communicator().lane_of(message);
      const int64_t word = value_of(static_cast<int>(i) / 5, message.tag);
      if (message.sends) {
        rank.communicator().send(rank.put(&word, kWord, lane), kWord, peer, message.tag);
      } else {
        wanted.emplace_back(word, rank.room(kWord, lane));
        rank.communicator().recv(wanted.back().second, kWord, peer, message.tag);
        rank.device().follow(Lane::kCompute, lane);
      }
    }
    for (const auto& [word, at] : wanted) {
      int64_t got = 0;
      rank.get(&got, at, kWord);
      EXPECT_EQ(got, word);
    }
  });
  EXPECT_THAT(errors, Each(std::string()));
}

// This rank's device waits in the other communicator, whose watcher hears of the failure of this.
TEST(CudaNcclTest, AnAbortEndsWhatWaitsInTheRanksOtherCommunicators) {
  const auto errors = run_ranks(kNccl, 2, kPatient, [](Communicator& communicator) {
    const std::unique_ptr<Communicator> other = communicator.split(0, communicator.rank());
    HostRank& rank = host_rank(*other);
    const int64_t word = 1;
    std::byte* there = rank.put(&word, sizeof(word));
    const auto add = [&] {
      rank.communicator().all_reduce(there, 1, DType::kInt64, ReductionKind::kSum);
    };
    add();
    if (communicator.rank() == 0) {
      add();  // which rank 1 never does
      communicator.abort("enough");
    }
  });
  EXPECT_THAT(errors, Each(std::string()));
}

// One of the communicator of all, and one for each channel, which its sender makes.
TEST(CudaNcclTest, OnlySendersMakeIdentifiersForChannels) {
  const auto errors = run_ranks(kNccl, 3, kPatient, [](Communicator& communicator) {
    const std::vector<Message> messages[] = {
        {{1, 4, true, 8}, {2, 5, true, 8}}, {{0, 4, false, 8}}, {{0, 5, false, 8}}};
    communicator.expect_messages(messages[communicator.rank()]);
    communicator.barrier();
    EXPECT_EQ(cuda_double::num_identifiers(), 1 + 2);
    communicator.barrier();
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST(CudaNcclTest, ARefusalSaysWhatNcclSaidLast) {
  const auto errors = run_ranks(kNccl, 1, kPatient, [](Communicator& communicator) {
    HostRank& rank = host_rank(communicator);
    const int64_t word = 1;
    std::byte* there = rank.put(&word, sizeof(word));
    cuda_double::fail_call(1);
    rank.communicator().broadcast(there, sizeof(word), 0);
  });
  EXPECT_THAT(errors[0], HasSubstr("broadcast #0: internal error"));
  EXPECT_THAT(errors[0], HasSubstr("its last error: ncclBroadcast went wrong"));
}

// Nothing ends then that needs the driver; the other ranks are told all the same.
TEST(CudaNcclTest, ADriverThatDoesNotAnswerIsTold) {
  const auto errors =
      run_ranks(kNccl, 2, std::chrono::milliseconds(400), [](Communicator& communicator) {
        HostRank& rank = host_rank(communicator);
        const int64_t word = 1;
        std::byte* there = rank.put(&word, sizeof(word));
        rank.communicator().barrier();
        if (rank.rank() == 0) {
          cuda_double::block_queries(0);
          rank.communicator().all_reduce(there, 1, DType::kInt64, ReductionKind::kSum);
          return;
        }
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (rank.world().failure().empty() && std::chrono::steady_clock::now() < end) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        const std::string told = rank.world().failure();
        cuda_double::block_queries(-1);
        EXPECT_THAT(told, HasSubstr("the driver of cuda:0 has not answered within 800 ms"));
      });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST(CudaNcclTest, MoreLanesThanCudaKeepsApartAreTold) {
  set_log_level(LogLevel::kInfo);  // other tests are silent
  for (const int tags : {kMostLanes - 2, kMostLanes - 1}) {
    ::testing::internal::CaptureStderr();
    const auto errors = run_ranks(kNccl, 2, kPatient, [tags](Communicator& communicator) {
      // Received in the opposite order: a lane each, beside those of computation and collectives.
      std::vector<Message> messages;
      for (int i = 0; i < tags; ++i) {
        const bool sends = communicator.rank() == 0;
        messages.push_back({1 - communicator.rank(), sends ? i : tags - 1 - i, sends, 8});
      }
      communicator.expect_messages(messages);
    });
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(errors, Each(std::string()));
    EXPECT_EQ(told.find("has 33 lanes") != std::string::npos, tags == kMostLanes - 1) << told;
  }
}

}  // namespace
}  // namespace trainrt
