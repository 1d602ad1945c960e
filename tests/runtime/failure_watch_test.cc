#include "runtime/failure_watch.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <thread>

#include "parallel/socket.h"

namespace trainrt {
namespace {

// Rank 0 meets a rank 1 that fails, and goes on without asking how it is.
void work_alone_for_ever() {
  Socket listener = Socket::listening(0);
  RankPlace place;
  place.world_size = 2;
  place.port = listener.local_port();
  place.listening_fd = ::dup(listener.fd());
  RankPlace other = place;
  other.rank = 1;
  other.listening_fd = -1;
  std::thread one([&] {
    const auto rendezvous = Rendezvous::join(other, std::chrono::seconds(60));
    rendezvous->publish({1, ErrorCode::kIo, "rank 1 lost its disk"});
    std::this_thread::sleep_for(std::chrono::hours(1));
  });
  const Ranks ranks(place, 60);
  const FailureWatch watch(ranks, false);
  one.join();
}

TEST(FailureWatchDeathTest, EndsARankThatGoesOnAfterTheJobHasFailed) {
  EXPECT_EXIT(work_alone_for_ever(),
              ::testing::ExitedWithCode(exit_code(ErrorCode::kIo)),
              "\\[rank 0\\] error: rank 1 lost its disk");
}

}  // namespace
}  // namespace trainrt
