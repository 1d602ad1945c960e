// The facts every communicator must satisfy, as one suite over implementations: ranks are threads
// of the test whatever the transport is. Included by one file of a program, which says what is
// tested: INSTANTIATE_TEST_SUITE_P(Transport, CommunicatorTest, ...).
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "graph/base/error.h"
#include "parallel/communicator.h"

namespace trainrt {

struct CommunicatorKind {
  std::string name;
  std::function<std::vector<std::unique_ptr<Communicator>>(int world_size,
                                                           std::chrono::milliseconds deadline)>
      make;
  // Whether ranks that call different things are told so. NCCL compares nothing: they wait for each
  // other until the deadline.
  bool compares_calls = true;
  std::function<void()> check_end = [] {};  // when all ranks have gone
};

// Runs fn(communicator) on a thread per rank; the message of what each rank threw, "" if nothing.
inline std::vector<std::string> run_ranks(const CommunicatorKind& kind,
                                          int world_size,
                                          std::chrono::milliseconds deadline,
                                          const std::function<void(Communicator&)>& fn) {
  std::vector<std::unique_ptr<Communicator>> communicators = kind.make(world_size, deadline);
  std::vector<std::string> errors(communicators.size());
  std::barrier all_done(static_cast<std::ptrdiff_t>(communicators.size()));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < communicators.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        fn(*communicators[r]);
      } catch (const std::exception& error) {
        errors[r] = error.what();
        communicators[r]->abort(error.what());
      }
      all_done.arrive_and_wait();
      communicators[r].reset();  // closing may be collective
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  kind.check_end();
  return errors;
}

inline std::string kind_name(const testing::TestParamInfo<CommunicatorKind>& tested) {
  return tested.param.name;
}

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr std::chrono::milliseconds kPatient{60000};

class CommunicatorTest : public testing::TestWithParam<CommunicatorKind> {
 protected:
  void expect_all(int world_size, const std::function<void(Communicator&)>& fn) {
    EXPECT_THAT(run_ranks(GetParam(), world_size, kPatient, fn), Each(std::string()))
        << world_size << " ranks";
  }
};

// Values whose sum depends on the order of summation.
inline std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = std::sin(static_cast<float>(i) * 1.7f + static_cast<float>(rank)) *
                std::pow(10.0f, static_cast<float>((static_cast<int>(i) + rank) % 7));
  }
  return values;
}

inline float sum_in_rank_order(int world_size, size_t count, size_t i) {
  float sum = values_of(0, count)[i];
  for (int r = 1; r < world_size; ++r) {
    sum += values_of(r, count)[i];
  }
  return sum;
}

TEST_P(CommunicatorTest, AllReduceSumsInRankOrder) {
  for (const int n : {1, 2, 3, 4}) {
    expect_all(n, [&](Communicator& c) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{63}, size_t{1000}}) {
        std::vector<float> data = values_of(c.rank(), count);
        c.all_reduce(
            data.data(), static_cast<int64_t>(count), DType::kFloat32, ReductionKind::kSum);
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(data[i], sum_in_rank_order(n, count, i));
        }
      }
    });
  }
}

TEST_P(CommunicatorTest, AllReduceTakesEveryDtypeAndReduction) {
  expect_all(3, [](Communicator& c) {
    int64_t whole = c.rank() + 1;
    c.all_reduce(&whole, 1, DType::kInt64, ReductionKind::kMax);
    EXPECT_EQ(whole, 3);
    double least = 1.0 / (c.rank() + 1);
    c.all_reduce(&least, 1, DType::kFloat64, ReductionKind::kMin);
    EXPECT_EQ(least, 1.0 / 3);
    BFloat16 half(static_cast<float>(c.rank()) + 0.5f);
    c.all_reduce(&half, 1, DType::kBFloat16, ReductionKind::kSum);
    EXPECT_EQ(static_cast<float>(half), 4.5f);
    Float16 fp16(static_cast<float>(c.rank()) + 0.5f);
    c.all_reduce(&fp16, 1, DType::kFloat16, ReductionKind::kSum);
    EXPECT_EQ(static_cast<float>(fp16), 4.5f);
  });
}

TEST_P(CommunicatorTest, ReduceScatterTakesUnevenAndEmptySegments) {
  const std::vector<int64_t> counts = {5, 0, 70};
  expect_all(3, [&](Communicator& c) {
    const std::vector<float> data = values_of(c.rank(), 75);
    std::vector<float> mine(static_cast<size_t>(counts[static_cast<size_t>(c.rank())]));
    c.reduce_scatter(data.data(), mine.data(), counts, DType::kFloat32, ReductionKind::kSum);
    const size_t begin = c.rank() == 0 ? 0 : 5;
    for (size_t i = 0; i < mine.size(); ++i) {
      ASSERT_EQ(mine[i], sum_in_rank_order(3, 75, begin + i));
    }
  });
}

// More than a transport takes at once, and not a multiple of anything.
TEST_P(CommunicatorTest, LargeBuffersAreReducedAndGatheredInRankOrder) {
  constexpr size_t kCount = 1500007;
  const std::vector<int64_t> counts = {700001, 3, 800003};
  expect_all(3, [&](Communicator& c) {
    const std::vector<float> own = values_of(c.rank(), kCount);
    const int64_t mine = counts[static_cast<size_t>(c.rank())];
    std::vector<float> reduced = own, segment(static_cast<size_t>(mine)), gathered(kCount);
    c.all_reduce(reduced.data(), kCount, DType::kFloat32, ReductionKind::kSum);
    c.reduce_scatter(own.data(), segment.data(), counts, DType::kFloat32, ReductionKind::kSum);
    c.all_gather(segment.data(), gathered.data(), counts, DType::kFloat32);
    EXPECT_EQ(reduced, gathered);
    std::vector<float> sum = values_of(0, kCount);
    for (int r = 1; r < 3; ++r) {
      const std::vector<float> next = values_of(r, kCount);
      for (size_t i = 0; i < kCount; ++i) {
        sum[i] += next[i];
      }
    }
    EXPECT_EQ(reduced, sum);
    std::vector<float> copy = c.rank() == 1 ? own : std::vector<float>(kCount);
    c.broadcast(copy.data(), static_cast<int64_t>(kCount * sizeof(float)), 1);
    EXPECT_EQ(copy, values_of(1, kCount));
  });
}

// A bucket gives what its tensors give one by one; in sum they are more than a transport packs at
// once, and among them are empty and very small ones.
TEST_P(CommunicatorTest, BucketsGiveWhatTheirTensorsGive) {
  for (const std::vector<size_t>& sizes :
       {std::vector<size_t>{3, 1, 2}, std::vector<size_t>{700, 0, 1, 350001, 63, 900007}}) {
    expect_all(3, [&](Communicator& c) {
      std::vector<std::vector<float>> data, sums, segments, gathered;
      std::vector<WholeTensor> whole;
      std::vector<CutTensor> scattered, cut;
      for (const size_t size : sizes) {
        const std::vector<float> values = values_of(c.rank(), size);
        sums.push_back(values);
        c.all_reduce(
            sums.back().data(), static_cast<int64_t>(size), DType::kFloat32, ReductionKind::kSum);
        const int64_t first = static_cast<int64_t>(size / 4), last = static_cast<int64_t>(size / 3);
        const std::vector<int64_t> counts = {
            first, static_cast<int64_t>(size) - first - last, last};
        data.push_back(values);
        segments.emplace_back(static_cast<size_t>(counts[static_cast<size_t>(c.rank())]));
        gathered.emplace_back(size);
        scattered.push_back({nullptr, nullptr, counts});
      }
      const std::vector<std::vector<float>> inputs = data;
      for (size_t t = 0; t < sizes.size(); ++t) {
        whole.push_back({data[t].data(), static_cast<int64_t>(sizes[t])});
        scattered[t].input = inputs[t].data();
        scattered[t].output = segments[t].data();
        cut.push_back({segments[t].data(), gathered[t].data(), scattered[t].counts});
      }
      c.all_reduce(whole, DType::kFloat32, ReductionKind::kSum);
      c.reduce_scatter(scattered, DType::kFloat32, ReductionKind::kSum);
      c.all_gather(cut, DType::kFloat32);
      for (size_t t = 0; t < sizes.size(); ++t) {
        ASSERT_EQ(data[t], sums[t]) << "tensor " << t;
        ASSERT_EQ(gathered[t], sums[t]) << "tensor " << t;
      }
    });
  }
}

TEST_P(CommunicatorTest, AMessageOfAnotherSizeIsTold) {
  const std::vector<std::string> errors =
      run_ranks(GetParam(), 2, std::chrono::milliseconds(3000), [](Communicator& c) {
        int64_t words[100] = {};
        if (c.rank() == 0) {
          c.expect_messages({{1, 4, true, sizeof(words)}});
          c.send(words, sizeof(words), 1, 4);
          c.barrier();
        } else {
          c.expect_messages({{0, 4, false, 16}});
          c.recv(words, 16, 0, 4);
        }
      });
  if (GetParam().compares_calls) {
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("expects 16 bytes"), HasSubstr("sent 800"))));
  } else {
    EXPECT_THAT(errors, Each(HasSubstr("did not end within 3000 ms")));
  }
}

TEST_P(CommunicatorTest, AllGatherTakesUnevenAndEmptySegments) {
  const std::vector<int64_t> counts = {2, 0, 3};
  expect_all(3, [&](Communicator& c) {
    const std::vector<int32_t> mine(static_cast<size_t>(counts[static_cast<size_t>(c.rank())]),
                                    c.rank());
    std::vector<int32_t> all(5, -1);
    c.all_gather(mine.data(), all.data(), counts, DType::kInt32);
    EXPECT_EQ(all, (std::vector<int32_t>{0, 0, 2, 2, 2}));
  });
}

TEST_P(CommunicatorTest, AllToAllDeliversSegmentsInRankOrder) {
  expect_all(3, [](Communicator& c) {
    // Rank r sends q + 1 copies of 10 r + q to rank q.
    std::vector<int64_t> send_counts, recv_counts;
    std::vector<int32_t> data, wanted;
    for (int q = 0; q < 3; ++q) {
      send_counts.push_back(q + 1);
      recv_counts.push_back(c.rank() + 1);
      data.insert(data.end(), static_cast<size_t>(q) + 1, 10 * c.rank() + q);
      wanted.insert(wanted.end(), static_cast<size_t>(c.rank()) + 1, 10 * q + c.rank());
    }
    std::vector<int32_t> received(wanted.size(), -1);
    c.all_to_all(data.data(), send_counts, received.data(), recv_counts, DType::kInt32);
    EXPECT_EQ(received, wanted);
  });
}

TEST_P(CommunicatorTest, BroadcastFromAnyRoot) {
  expect_all(3, [](Communicator& c) {
    for (int root = 0; root < 3; ++root) {
      int64_t word = c.rank() == root ? 42 + root : 0;
      c.broadcast(&word, sizeof(word), root);
      EXPECT_EQ(word, 42 + root);
    }
  });
}

TEST_P(CommunicatorTest, SendsCrossWithoutDeadlockAndTagsKeepThemApart) {
  expect_all(2, [](Communicator& c) {
    const int peer = 1 - c.rank();
    std::vector<double> large(200000, c.rank());
    const double small = 7.5 + c.rank();
    const int64_t large_bytes = static_cast<int64_t>(large.size() * sizeof(double));
    c.expect_messages({{peer, 1, true, large_bytes},
                       {peer, 2, true, sizeof(small)},
                       {peer, 2, false, sizeof(small)},
                       {peer, 1, false, large_bytes}});
    // Both send before either receives, as neighbours in 1F1B do.
    c.send(large.data(), large_bytes, peer, 1);
    c.send(&small, sizeof(small), peer, 2);
    large.assign(large.size(), -1);  // send() has copied
    double got = 0;
    c.recv(&got, sizeof(got), peer, 2);
    EXPECT_EQ(got, 7.5 + peer);
    std::vector<double> received(large.size());
    c.recv(received.data(), large_bytes, peer, 1);
    EXPECT_EQ(received, std::vector<double>(large.size(), peer));
  });
}

TEST_P(CommunicatorTest, ARankMaySendToItself) {
  expect_all(2, [](Communicator& c) {
    const int64_t word = 5 + c.rank();
    int64_t got = 0;
    c.send(&word, sizeof(word), c.rank(), 3);
    c.recv(&got, sizeof(got), c.rank(), 3);
    EXPECT_EQ(got, word);
  });
}

TEST_P(CommunicatorTest, MessagesOfOneTagArriveInOrder) {
  expect_all(2, [](Communicator& c) {
    c.expect_messages(std::vector<Message>(50, {1 - c.rank(), 0, c.rank() == 0, sizeof(int64_t)}));
    for (int64_t i = 0; i < 50; ++i) {
      if (c.rank() == 0) {
        c.send(&i, sizeof(i), 1, 0);
      } else {
        int64_t got = -1;
        c.recv(&got, sizeof(got), 0, 0);
        ASSERT_EQ(got, i);
      }
    }
  });
}

TEST_P(CommunicatorTest, SplitFormsGroupsByColorOrderedByKey) {
  expect_all(4, [](Communicator& c) {
    const std::unique_ptr<Communicator> group = c.split(c.rank() % 2, -c.rank());
    ASSERT_EQ(group->world_size(), 2);
    EXPECT_EQ(group->rank(), c.rank() < 2 ? 1 : 0);
    int64_t sum = c.rank();
    group->all_reduce(&sum, 1, DType::kInt64, ReductionKind::kSum);
    EXPECT_EQ(sum, c.rank() % 2 == 0 ? 2 : 4);
    // Groups of groups, and of one rank.
    const std::unique_ptr<Communicator> alone = group->split(group->rank(), 0);
    EXPECT_EQ(alone->world_size(), 1);
    alone->all_reduce(&sum, 1, DType::kInt64, ReductionKind::kSum);
    alone->barrier();
    c.barrier();
  });
}

TEST_P(CommunicatorTest, AMissingRankIsNamedWithCollectiveAndNumber) {
  const std::vector<std::string> errors =
      run_ranks(GetParam(), 3, std::chrono::milliseconds(700), [](Communicator& c) {
        c.barrier();
        if (c.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
          return;
        }
        float value = 1;
        c.all_reduce(&value, 1, DType::kFloat32, ReductionKind::kSum);
      });
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_THAT(errors[r], AllOf(HasSubstr("all_reduce #1"), HasSubstr("rank 1")));
  }
}

TEST_P(CommunicatorTest, AnAbortWakesTheOthersAndNamesTheCulprit) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> errors = run_ranks(GetParam(), 3, kPatient, [](Communicator& c) {
    const std::unique_ptr<Communicator> group = c.split(c.rank() == 0 ? 0 : 1, c.rank());
    const std::vector<Message> in_world[] = {{{2, 9, false, 8}}, {}, {{0, 9, true, 8}}};
    const std::vector<Message> in_group[] = {{}, {{1, 9, false, 8}}, {{0, 9, true, 8}}};
    c.expect_messages(in_world[c.rank()]);
    group->expect_messages(in_group[c.rank()]);
    if (c.rank() == 2) {
      TRAINRT_FAIL(kOutOfMemory, "no memory left");
    }
    int64_t word = 0;
    (c.rank() == 0 ? c : *group).recv(&word, sizeof(word), c.rank() == 0 ? 2 : 1, 9);
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 2"), HasSubstr("no memory left")));
  EXPECT_THAT(errors[1], AllOf(HasSubstr("rank 2"), HasSubstr("no memory left")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_P(CommunicatorTest, RanksThatFormDifferentBucketsAreTold) {
  if (!GetParam().compares_calls) {
    GTEST_SKIP() << "NCCL sees the calls of a bucket one by one";
  }
  const std::vector<std::string> errors =
      run_ranks(GetParam(), 2, std::chrono::milliseconds(3000), [](Communicator& c) {
        float value[2] = {1, 2};
        const std::vector<WholeTensor> joined = {{value, 2}}, apart = {{value, 1}, {value + 1, 1}};
        c.all_reduce(c.rank() == 0 ? joined : apart, DType::kFloat32, ReductionKind::kSum);
      });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("disagree"), HasSubstr("2 float32 in 2 tensors"))));
}

TEST_P(CommunicatorTest, RanksThatCallDifferentCollectivesAreTold) {
  const std::vector<std::string> errors =
      run_ranks(GetParam(), 2, std::chrono::milliseconds(3000), [](Communicator& c) {
        float value[2] = {1, 2};
        c.all_reduce(value, 1 + c.rank(), DType::kFloat32, ReductionKind::kSum);
      });
  EXPECT_THAT(errors, Each(HasSubstr("all_reduce")));
  EXPECT_THAT(errors[0] + errors[1],
              HasSubstr(GetParam().compares_calls ? "disagree" : "did not end within"));
}

}  // namespace trainrt
