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

}  // namespace
}  // namespace trainrt
