// The NCCL communicator on the double: ranks are threads, each with a device, and tensors lie
// there.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "parallel/nccl_communicator.h"
#include "parallel/thread_communicator.h"
#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"

namespace trainrt::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Words = std::vector<int64_t>;

// One rank: its device, its communicator, and words that go there and back.
class Rank {
 public:
  Rank(Communicator& world, std::chrono::milliseconds deadline)
      : device_(make(world.rank(), deadline)), communicator_(device_->make_communicator(world)) {}

  Communicator& communicator() { return *communicator_; }
  // Device memory that holds `words`.
  int64_t* put(const Words& words) {
    const int64_t bytes = static_cast<int64_t>(words.size() * sizeof(int64_t));
    buffers_.push_back(device_->allocate(std::max<int64_t>(bytes, 8)));
    if (bytes > 0) {
      device_->copy_to_device(buffers_.back()->data(), words.data(), bytes);
      device_->follow(Lane::kCommunication, Lane::kCompute);
    }
    return reinterpret_cast<int64_t*>(buffers_.back()->data());
  }
  Words get(const int64_t* data, size_t count) {
    Words words(count);
    device_->follow(Lane::kCompute, Lane::kCommunication);
    device_->copy_to_host(words.data(), data, static_cast<int64_t>(count * sizeof(int64_t)));
    return words;
  }

 private:
  static std::unique_ptr<Device> make(int rank, std::chrono::milliseconds deadline) {
    DeviceOptions options;
    options.deadline = deadline;
    return cuda_module().make_device(rank, options);
  }
  std::unique_ptr<Device> device_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::unique_ptr<Communicator> communicator_;
};

class CudaNcclTest : public ::testing::Test {
 protected:
  void SetUp() override { cuda_double::reset({.num_devices = 4}); }
  void TearDown() override { EXPECT_EQ(cuda_double::alive(), ""); }

  // Runs fn on a thread per rank; what each threw.
  static std::vector<std::string> run(
      int world_size,
      const std::function<void(Rank&)>& fn,
      std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
    auto worlds = make_thread_communicators(world_size, std::chrono::seconds(30));
    std::vector<std::string> errors(worlds.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < worlds.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          Rank rank(*worlds[r], deadline);
          fn(rank);
        } catch (const std::exception& error) {
          errors[r] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return errors;
  }
};

TEST_F(CudaNcclTest, CollectivesGiveEveryRankItsPart) {
  const auto errors = run(3, [](Rank& rank) {
    Communicator& c = rank.communicator();
    const int64_t r = c.rank();
    int64_t* sum = rank.put({r, 10});
    c.all_reduce(sum, 2, DType::kInt64, ReductionKind::kSum);
    EXPECT_THAT(rank.get(sum, 2), ElementsAre(3, 30));
    int64_t* max = rank.put({r});
    c.all_reduce(max, 1, DType::kInt64, ReductionKind::kMax);
    EXPECT_THAT(rank.get(max, 1), ElementsAre(2));
    int64_t* word = rank.put({r == 1 ? 7 : 0});
    c.broadcast(word, 8, 1);
    EXPECT_THAT(rank.get(word, 1), ElementsAre(7));
    int64_t* all = rank.put(Words(6));
    c.all_gather(rank.put({r, r + 10}), all, {2, 2, 2}, DType::kInt64);
    EXPECT_THAT(rank.get(all, 6), ElementsAre(0, 10, 1, 11, 2, 12));
    int64_t* part = rank.put({0, 0});
    c.reduce_scatter(
        rank.put({1, 2, 3, 4, 5, 6}), part, {2, 2, 2}, DType::kInt64, ReductionKind::kSum);
    EXPECT_THAT(rank.get(part, 2), ElementsAre(3 * (2 * r + 1), 3 * (2 * r + 2)));
    c.barrier();
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST_F(CudaNcclTest, SegmentsMayDifferInSize) {
  const std::vector<int64_t> counts = {1, 0, 3};
  const auto errors = run(3, [&](Rank& rank) {
    Communicator& c = rank.communicator();
    const size_t own = static_cast<size_t>(counts[static_cast<size_t>(c.rank())]);
    int64_t* all = rank.put(Words(4));
    c.all_gather(rank.put(Words(own, c.rank())), all, counts, DType::kInt64);
    EXPECT_THAT(rank.get(all, 4), ElementsAre(0, 2, 2, 2));
    int64_t* part = rank.put(Words(own));
    c.reduce_scatter(rank.put({1, 2, 3, 4}), part, counts, DType::kInt64, ReductionKind::kSum);
    const Words expected[] = {{3}, {}, {6, 9, 12}};
    EXPECT_EQ(rank.get(part, own), expected[c.rank()]);
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST_F(CudaNcclTest, SendsMeetReceivesInOrder) {
  const auto errors = run(2, [](Rank& rank) {
    Communicator& c = rank.communicator();
    for (int64_t i = 0; i < 20; ++i) {
      if (c.rank() == 0) {
        c.send(rank.put({i}), 8, 1, 0);
      } else {
        int64_t* word = rank.put({-1});
        c.recv(word, 8, 0, 0);
        EXPECT_THAT(rank.get(word, 1), ElementsAre(i));
      }
    }
    c.barrier();
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST_F(CudaNcclTest, SplitFormsGroupsByColorOrderedByKey) {
  const auto errors = run(4, [](Rank& rank) {
    Communicator& c = rank.communicator();
    const std::unique_ptr<Communicator> group = c.split(c.rank() % 2, -c.rank());
    EXPECT_EQ(group->world_size(), 2);
    EXPECT_EQ(group->rank(), c.rank() < 2 ? 1 : 0);
    int64_t* sum = rank.put({c.rank()});
    group->all_reduce(sum, 1, DType::kInt64, ReductionKind::kSum);
    EXPECT_THAT(rank.get(sum, 1), ElementsAre(c.rank() % 2 == 0 ? 2 : 4));
    group->barrier();
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST_F(CudaNcclTest, ARankThatStaysAwayEndsTheWaitAtTheDeadline) {
  std::atomic<bool> over{false};
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run(
      2,
      [&](Rank& rank) {
        Communicator& c = rank.communicator();
        if (c.rank() == 1) {
          while (!over) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          return;
        }
        try {
          int64_t* word = rank.put({1});
          c.all_reduce(word, 1, DType::kInt64, ReductionKind::kSum);
          rank.get(word, 1);  // waits for what never comes, until the communicator is aborted
          c.all_reduce(word, 1, DType::kInt64, ReductionKind::kSum);
        } catch (...) {
          over = true;
          throw;
        }
        over = true;
      },
      std::chrono::milliseconds(300));
  EXPECT_THAT(errors[0], HasSubstr("all_reduce number 1 did not end within 300 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace trainrt::testing
