#include <unistd.h>

#include "parallel/gloo_communicator.h"
#include "parallel/thread_communicator.h"
#include "tests/parallel/communicator_suite.h"

namespace trainrt {
namespace {

// As processes do it, but for being threads: each joins and connects by itself.
std::vector<std::unique_ptr<Communicator>> make_process_communicators(
    int world_size, std::chrono::milliseconds deadline, bool may_share_memory) {
  Socket listener = Socket::listening(0);
  RankPlace place;
  place.world_size = world_size;
  place.port = listener.local_port();
  std::vector<std::unique_ptr<Communicator>> communicators(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    place.rank = rank;
    place.listening_fd = rank == 0 ? ::dup(listener.fd()) : -1;
    threads.emplace_back([&communicators, place, deadline, may_share_memory] {
      communicators[static_cast<size_t>(place.rank)] =
          make_gloo_communicator(Rendezvous::join(place, deadline), may_share_memory);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return communicators;
}

INSTANTIATE_TEST_SUITE_P(
    Transport,
    CommunicatorTest,
    testing::Values(CommunicatorKind{"thread", make_thread_communicators},
                    CommunicatorKind{"gloo",
                                     [](int world_size, std::chrono::milliseconds deadline) {
                                       return make_process_communicators(
                                           world_size, deadline, false);
                                     }},
                    CommunicatorKind{"shared",
                                     [](int world_size, std::chrono::milliseconds deadline) {
                                       return make_process_communicators(
                                           world_size, deadline, true);
                                     }}),
    kind_name);

// Rank 1 has nothing to do but wait while rank 0 reads its tensor; what wakes it is a failure
// elsewhere, and it takes the tensor with it.
TEST(ThreadCommunicatorTest, ARankLeavesWhenNobodyIsAtItsMemory) {
  const std::vector<int64_t> counts = {int64_t{1} << 21, 0};
  for (int round = 0; round < 5; ++round) {
    auto ranks = make_thread_communicators(3, kPatient);
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks.size(); ++r) {
      threads.emplace_back([&, r] {
        Communicator& world = *ranks[r];
        const std::unique_ptr<Communicator> group = world.split(r == 2 ? 1 : 0, world.rank());
        if (r == 2) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          world.abort("made to");
          return;
        }
        try {
          // In pages of their own, which are gone when they are.
          const std::vector<float> input(static_cast<size_t>(counts[0]), 1);
          std::vector<float> output(static_cast<size_t>(counts[r]));
          for (;;) {
            group->reduce_scatter(
                input.data(), output.data(), counts, DType::kFloat32, ReductionKind::kSum);
          }
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr("made to"));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

}  // namespace
}  // namespace trainrt
