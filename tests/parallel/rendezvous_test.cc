// How ranks meet: here as threads, each with its own connection.
#include "parallel/rendezvous.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

namespace trainrt {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr milliseconds kPatient{30000};

struct Outcome {
  std::string message;  // of what was thrown
  ErrorCode code = ErrorCode::kInternal;
};

std::vector<RankPlace> places(int world_size) {
  std::vector<RankPlace> all(static_cast<size_t>(world_size));
  Socket listener = Socket::listening(0);
  for (int rank = 0; rank < world_size; ++rank) {
    RankPlace& place = all[static_cast<size_t>(rank)];
    place.rank = rank;
    place.world_size = world_size;
    place.port = listener.local_port();
    place.version = "1.0";
  }
  all[0].listening_fd = ::dup(listener.fd());
  return all;
}

// A thread for each place: joins, then calls fn.
std::vector<Outcome> meet(const std::vector<RankPlace>& all,
                          milliseconds deadline,
                          const std::function<void(Rendezvous&)>& fn) {
  std::vector<Outcome> outcomes(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        const std::unique_ptr<Rendezvous> rendezvous = Rendezvous::join(all[i], deadline);
        fn(*rendezvous);
        rendezvous->leave(kPatient);
      } catch (const Error& error) {
        outcomes[i] = {error.what(), error.code()};
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return outcomes;
}

std::vector<std::string> messages(const std::vector<Outcome>& outcomes) {
  std::vector<std::string> texts;
  for (const Outcome& outcome : outcomes) {
    texts.push_back(outcome.message);
  }
  return texts;
}

// What comes next on a connection; "" when it ends.
std::string next_text(const Socket& socket, MessageReader& reader) {
  std::string why;
  for (;;) {
    if (const std::optional<std::string> text = reader.next()) {
      return *text;
    }
    if (reader.read(socket, why) == MessageReader::Status::kClosed) {
      return "";
    }
    std::this_thread::yield();
  }
}

// A connection to the rank 0 of `world_size` that has let this in as its rank 1, which is silent.
Socket silent_rank_one(int port, int world_size) {
  std::string why;
  std::optional<Socket> one = Socket::connected("127.0.0.1", port, kPatient, why);
  EXPECT_TRUE(one.has_value()) << why;
  EXPECT_TRUE(one->send_message(R"({"type": "hello", "rank": 1, "job": "", "generation": 0,
      "version": "1.0", "host": "a", "host_id": "a", "pid": 17, "world_size": )" +
                                    std::to_string(world_size) + "}",
                                kPatient));
  MessageReader reader;
  EXPECT_THAT(next_text(*one, reader), HasSubstr("noted"));
  return std::move(*one);
}

// Takes the next connection and what it says first.
Socket accepted_caller(const Socket& listener) {
  std::optional<Socket> caller;
  while (!(caller = listener.accepted())) {
    std::this_thread::yield();
  }
  MessageReader reader;
  EXPECT_NE(next_text(*caller, reader), "");
  return std::move(*caller);
}

TEST(RendezvousTest, AllLearnWhatEachBrings) {
  const auto outcomes = meet(places(4), kPatient, [](Rendezvous& r) {
    EXPECT_EQ(r.address(), "127.0.0.1");
    for (const std::string round : {"a", "b"}) {
      const auto all = r.exchange("round " + round, round + std::to_string(r.rank()));
      EXPECT_THAT(all, ::testing::ElementsAre(round + "0", round + "1", round + "2", round + "3"));
    }
  });
  EXPECT_THAT(messages(outcomes), Each(""));
}

TEST(RendezvousTest, ADifferenceIsToldOnAllRanks) {
  const auto outcomes = meet(places(3), kPatient, [](Rendezvous& r) {
    r.agree({{"the model", "abc"}, {"--lr", r.rank() == 2 ? "0.1" : "0.01"}});
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(outcome.message, HasSubstr("--lr is '0.01' on rank 0 and '0.1' on rank 2"));
  }
}

TEST(RendezvousTest, ARankThatNeverComesIsNamed) {
  std::vector<RankPlace> all = places(4);
  all.erase(all.begin() + 2);
  const auto outcomes = meet(all, milliseconds(600), [](Rendezvous&) {});
  EXPECT_THAT(messages(outcomes),
              Each(AllOf(HasSubstr("rank 2 of 4 has not come"), HasSubstr("arrived: 0, 1, 3"))));
  EXPECT_EQ(outcomes[0].code, ErrorCode::kCommunication);
}

TEST(RendezvousTest, RanksThatNeverComeAreNamed) {
  std::vector<RankPlace> all = places(4);
  all.erase(all.begin() + 2, all.end());
  const auto outcomes = meet(all, milliseconds(600), [](Rendezvous&) {});
  EXPECT_THAT(messages(outcomes), Each(HasSubstr("ranks 2, 3 of 4 have not come within")));
}

TEST(RendezvousTest, WithoutRankZeroTheAddressIsNamed) {
  std::vector<RankPlace> all = places(2);
  ::close(all[0].listening_fd);
  all.erase(all.begin());
  const auto outcomes = meet(all, milliseconds(400), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message,
              AllOf(HasSubstr("rank 1 could not join rank 0 at 127.0.0.1:"),
                    HasSubstr("Connection refused")));
  EXPECT_EQ(outcomes[0].code, ErrorCode::kCommunication);
}

TEST(RendezvousTest, TheEndOfARankZeroThatLetOneInIsNoticedAtOnce) {
  std::vector<RankPlace> all = places(2);
  const Socket listener(all[0].listening_fd);
  std::thread rank_zero([&] {
    const Socket caller = accepted_caller(listener);
    ASSERT_TRUE(caller.send_message(R"({"type": "noted"})", kPatient));
  });
  all.erase(all.begin());
  const auto outcomes = meet(all, std::chrono::hours(1), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message,
              AllOf(HasSubstr("rank 0 (at 127.0.0.1:"), HasSubstr("died or is out of reach")));
  rank_zero.join();
}

TEST(RendezvousTest, WhoComesAfterADeathIsToldOfIt) {
  std::vector<RankPlace> all = places(3);
  Outcome first;
  std::thread rank_zero(
      [&] { first = meet({all[0]}, std::chrono::hours(1), [](Rendezvous&) {})[0]; });
  silent_rank_one(all[1].port, 3).close();
  const auto last = meet({all[2]}, std::chrono::hours(1), [](Rendezvous&) {});
  rank_zero.join();
  for (const Outcome& outcome : {first, last[0]}) {
    EXPECT_THAT(outcome.message, HasSubstr("rank 1 (process 17 on a) died"));
  }
}

// It says nothing after its hello, and nobody waits for it.
TEST(RendezvousTest, ASilentRankIsNamed) {
  const std::vector<RankPlace> all = places(2);
  Socket one;
  std::thread rank_one([&] { one = silent_rank_one(all[1].port, 2); });
  const auto outcomes = meet({all[0]}, milliseconds(400), [](Rendezvous& r) {
    const Failure failure = r.wait_for_failure(kPatient).value();
    EXPECT_EQ(failure.rank, 1);
    EXPECT_THAT(failure.message, HasSubstr("rank 1 (process 17 on a) has given no sign of life"));
  });
  EXPECT_EQ(outcomes[0].message, "");
  rank_one.join();
}

TEST(RendezvousTest, ASilentRankZeroIsNamed) {
  std::vector<RankPlace> all = places(2);
  const Socket listener(all[0].listening_fd);
  Socket caller;
  std::thread rank_zero([&] {
    caller = accepted_caller(listener);
    ASSERT_TRUE(caller.send_message(R"({"type": "noted"})", kPatient));
    ASSERT_TRUE(caller.send_message(
        R"({"type": "welcome", "addresses": ["::1", "::1"], "hosts": ["a", "a"]})", kPatient));
    ASSERT_TRUE(caller.send_message(R"({"type": "alive", "doing": "planning"})", kPatient));
  });
  const auto outcomes = meet({all[1]}, milliseconds(400), [](Rendezvous& r) {
    const Failure failure = r.wait_for_failure(kPatient).value();
    EXPECT_EQ(failure.rank, 0);
    EXPECT_THAT(failure.message,
                AllOf(HasSubstr("rank 0 (at 127.0.0.1:"),
                      HasSubstr("has given no sign of life"),
                      HasSubstr("it was last planning")));
  });
  EXPECT_EQ(outcomes[0].message, "");
  rank_zero.join();
}

TEST(RendezvousTest, ARankThatCannotTakePartIsNotWaitedFor) {
  for (const size_t missing : {size_t{0}, size_t{1}, size_t{2}}) {
    std::vector<RankPlace> all = places(3);
    const RankPlace place = all[missing];
    all.erase(all.begin() + static_cast<ptrdiff_t>(missing));
    std::thread declines([&] {
      Rendezvous::decline(place, {place.rank, ErrorCode::kIo, "it has no model"}, kPatient);
    });
    // Where it comes last the others have met when they are told.
    const auto outcomes =
        meet(all, std::chrono::hours(1), [](Rendezvous& r) { r.exchange("x", "y"); });
    EXPECT_THAT(messages(outcomes), Each("it has no model"));
    EXPECT_EQ(outcomes[0].code, ErrorCode::kIo);
    declines.join();
  }
}

TEST(RendezvousTest, AnotherProgramAtTheAddressIsNamed) {
  std::vector<RankPlace> all = places(2);
  const Socket listener(all[0].listening_fd);
  std::thread server([&] {
    const Socket caller = accepted_caller(listener);
    ASSERT_GT(::send(caller.fd(), "HTTP/1.1 400 Bad Request\r\n\r\n", 28, 0), 0);
  });
  const auto outcomes = meet({all[1]}, std::chrono::hours(1), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message,
              HasSubstr("what answers at 127.0.0.1:" + std::to_string(all[1].port) +
                        " is no rank 0 of this program"));
  server.join();
}

TEST(RendezvousTest, AnUnknownHostIsNamed) {
  RankPlace place;
  place.rank = 1;
  place.world_size = 2;
  place.host = "no-such-host.invalid";
  place.port = 29500;
  const auto outcomes = meet({place}, milliseconds(300), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message, HasSubstr("the name 'no-such-host.invalid' is not found"));
}

TEST(RendezvousTest, APortInUseIsNamed) {
  const Socket taken = Socket::listening(0);
  RankPlace place;
  place.world_size = 2;
  place.port = taken.local_port();
  const auto outcomes = meet({place}, kPatient, [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message,
              AllOf(HasSubstr("port " + std::to_string(place.port)), HasSubstr("in use")));
}

TEST(RendezvousTest, OtherVersionsWorldSizesAndTwinsAreRefused) {
  std::vector<RankPlace> all = places(2);
  all[1].version = "1.1";
  EXPECT_THAT(messages(meet(all, kPatient, [](Rendezvous&) {})),
              Each(HasSubstr("rank 1 runs version 1.1, rank 0 version 1.0")));
  all = places(2);
  all[1].world_size = 3;
  EXPECT_THAT(messages(meet(all, kPatient, [](Rendezvous&) {})),
              Each(HasSubstr("rank 1 was started for 3 ranks, rank 0 for 2")));
  all = places(3);
  all[1].rank = 2;
  const auto twins = meet(all, kPatient, [](Rendezvous&) {});
  EXPECT_THAT(messages(twins), Each(HasSubstr("two processes say they are rank 2")));
  EXPECT_EQ(twins[0].code, ErrorCode::kInvalidArgument);
}

TEST(RendezvousTest, AnOlderGenerationIsSentAway) {
  std::vector<RankPlace> all = places(2);
  all[0].generation = 3;
  all[1].generation = 2;
  const auto outcomes = meet(all, milliseconds(800), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message, HasSubstr("rank 1 of 2 has not come"));
  EXPECT_THAT(outcomes[1].message,
              AllOf(HasSubstr("generation 3"), HasSubstr("generation 2 and has to end")));
}

TEST(RendezvousTest, ANewerGenerationEndsAnOlderOne) {
  std::vector<RankPlace> all = places(2);
  all[0].generation = 2;
  all[1].generation = 3;
  const auto outcomes = meet(all, milliseconds(800), [](Rendezvous&) {});
  EXPECT_THAT(outcomes[0].message, HasSubstr("generation 3 of the job began"));
}

TEST(RendezvousTest, ARestartedRankWaitsForItsOwnGeneration) {
  // Rank 1 of generation 1 finds rank 0 of generation 0 still there, and meets the next one.
  std::vector<RankPlace> old = places(2);
  std::vector<RankPlace> anew = old;
  anew[0].listening_fd = -1;
  anew[0].generation = anew[1].generation = 1;
  std::thread stale([&] {
    meet({old[0]}, kPatient, [](Rendezvous&) {});  // ends when generation 1 calls
    const auto outcomes = meet({anew[0]}, kPatient, [](Rendezvous&) {});
    EXPECT_EQ(outcomes[0].message, "");
  });
  const auto outcomes = meet({anew[1]}, kPatient, [](Rendezvous&) {});
  EXPECT_EQ(outcomes[0].message, "");
  stale.join();
}

TEST(RendezvousTest, AStrangerDoesNotDisturb) {
  std::vector<RankPlace> all = places(2);
  std::string why;
  const auto stranger = Socket::connected("127.0.0.1", all[0].port, kPatient, why);
  ASSERT_TRUE(stranger.has_value()) << why;
  ASSERT_GT(::send(stranger->fd(), "GET / HTTP/1.1\r\n\r\n", 18, 0), 0);
  EXPECT_THAT(messages(meet(all, kPatient, [](Rendezvous& r) { r.exchange("x", "y"); })), Each(""));
}

TEST(RendezvousTest, AFailureIsToldToAllWithItsOrigin) {
  const auto outcomes = meet(places(3), kPatient, [](Rendezvous& r) {
    if (r.rank() == 1) {
      r.publish({1, ErrorCode::kIo, "rank 1 lost its disk"});
    }
    const auto failure = r.wait_for_failure(kPatient);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->rank, 1);
    EXPECT_EQ(failure->code, ErrorCode::kIo);
    EXPECT_EQ(failure->message, "rank 1 lost its disk");
  });
  EXPECT_THAT(messages(outcomes), Each(""));
}

TEST(RendezvousTest, ARankThatEndsWithoutAWordIsNamed) {
  const auto outcomes = meet(places(3), kPatient, [](Rendezvous& r) {
    if (r.rank() == 2) {
      r.set_activity("in all_reduce #7", -1);
      std::this_thread::sleep_for(milliseconds(700));  // until it has been told
      TRAINRT_FAIL(kInternal, "gone");
    }
    const auto failure = r.wait_for_failure(kPatient);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->rank, 2);
    EXPECT_THAT(failure->message, AllOf(HasSubstr("rank 2"), HasSubstr("in all_reduce #7")));
  });
  EXPECT_EQ(outcomes[0].message, "");
}

// Rank 0 waits for rank 1, which waits for rank 2, which is busy: rank 2 is to blame.
TEST(RendezvousTest, BlameFollowsWhoWaitsForWhom) {
  const auto outcomes = meet(places(3), kPatient, [](Rendezvous& r) {
    r.set_activity(r.rank() == 2 ? "computing, after barrier #4" : "in barrier #5",
                   r.rank() == 2 ? -1 : r.rank() + 1);
    std::this_thread::sleep_for(milliseconds(1200));
    const Failure failure = r.rank() == 0 ? r.blame(1, "rank 0 waited 1 s in barrier #5")
                                          : r.wait_for_failure(kPatient).value();
    EXPECT_EQ(failure.rank, 2);
    EXPECT_THAT(failure.message,
                AllOf(HasSubstr("barrier #5"),
                      HasSubstr("rank 2 (process"),
                      HasSubstr("computing, after barrier #4")));
  });
  EXPECT_THAT(messages(outcomes), Each(""));
}

}  // namespace
}  // namespace trainrt
