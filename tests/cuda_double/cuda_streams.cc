// A stream is a queue. To bring something about (an event, the end of a stream) the waiting thread
// picks, by a generator with the test's seed, one stream after another whose head can run, and runs
// that head, until it has happened. Three moods, changed at random, decide who is picked: anybody,
// those whom nobody waits for first, or only those who must run.
#include "tests/cuda_double/cuda_streams.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/cuda_memory.h"

namespace cuda_double {

namespace {

struct Streams {
  std::vector<std::shared_ptr<CUstream_st>> all;  // in the order in which they were made
  std::mt19937_64 generator{0};
  int mood = 0;
};

Streams& streams() {
  static Streams instance;
  return instance;
}

bool is_over(const Op& op) {
  return std::all_of(op.meetings.begin(), op.meetings.end(), [](const auto& meeting) {
    return meeting->done || (!meeting->broken && meeting->missing == 0);
  });
}

bool can_run(CUstream_st& stream) {
  if (stream.queue.empty()) {
    return false;
  }
  Op& head = stream.queue.front();
  if (head.kind == Op::Kind::kMeet) {
    if (!head.arrived) {
      head.arrived = true;
      for (const auto& meeting : head.meetings) {
        --meeting->missing;
      }
    }
    return *head.given_up || is_over(head);
  }
  return head.kind != Op::Kind::kWait || head.record->done;
}

void run_head(const std::shared_ptr<CUstream_st>& stream) {
  Op op = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (op.kind == Op::Kind::kRecord) {
    op.record->done = true;
  } else if (op.kind == Op::Kind::kWork) {
    const MemoryAccess access;
    op.work();
  } else if (op.kind == Op::Kind::kMeet && !*op.given_up) {
    for (const auto& meeting : op.meetings) {
      if (!meeting->done) {
        meeting->done = true;
        const MemoryAccess access;
        meeting->work();
      }
    }
  }
  if (stream->destroyed && stream->queue.empty()) {
    auto& all = streams().all;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  }
}

// The stream that must move for `stream` to move: itself, or who records what its head waits for.
CUstream_st* blocking(CUstream_st* stream) {
  for (size_t depth = 0; depth <= streams().all.size(); ++depth) {
    if (can_run(*stream) || stream->queue.empty()) {
      return stream;
    }
    if (stream->queue.front().kind != Op::Kind::kWait) {
      return nullptr;  // it meets others
    }
    stream = stream->queue.front().record->stream.get();
  }
  return nullptr;
}

std::shared_ptr<CUstream_st> pick(CUstream_st& goal) {
  Streams& s = streams();
  if (s.generator() % 8 == 0) {
    s.mood = static_cast<int>(s.generator() % 3);
  }
  std::vector<std::shared_ptr<CUstream_st>> ready, others;
  const CUstream_st* needed = blocking(&goal);
  for (const auto& stream : s.all) {
    if (!can_run(*stream)) {
      continue;
    }
    if (s.mood == 2 && stream.get() == needed) {
      return stream;
    }
    ready.push_back(stream);
    if (stream.get() != &goal) {
      others.push_back(stream);
    }
  }
  const auto& from = s.mood == 1 && !others.empty() ? others : ready;
  return from.empty() ? nullptr : from[s.generator() % from.size()];
}

[[noreturn]] void hang(const char* what) {
  std::fprintf(stderr, "the double waits for ever: %s\n", what);
  for (const auto& stream : streams().all) {
    if (stream->queue.empty()) {
      continue;
    }
    const Op& head = stream->queue.front();
    std::fprintf(stderr,
                 "  a stream of device %d with %zu pieces of work: %s\n",
                 stream->device,
                 stream->queue.size(),
                 head.kind == Op::Kind::kWait   ? "waits for an event"
                 : head.kind == Op::Kind::kMeet ? "waits for other ranks"
                                                : "can run");
  }
  std::abort();
}

}  // namespace

std::recursive_mutex& mutex() {
  static std::recursive_mutex instance;
  return instance;
}

std::mt19937_64& generator() {
  return streams().generator;
}

void reset_streams(uint64_t seed) {
  streams().generator.seed(seed);
  streams().mood = 0;
}

bool breaks_capture() {
  bool breaks = false;
  for (const auto& stream : streams().all) {
    if (stream->capture != nullptr && stream->capture->thread == std::this_thread::get_id()) {
      stream->capture->invalid = breaks = true;
    }
  }
  return breaks;
}

std::shared_ptr<CUstream_st> add_stream(int device) {
  streams().all.push_back(std::make_shared<CUstream_st>());
  streams().all.back()->device = device;
  return streams().all.back();
}

std::shared_ptr<CUstream_st> find_stream(cudaStream_t stream) {
  for (const auto& known : streams().all) {
    if (known.get() == stream && !known->destroyed) {
      return known;
    }
  }
  return nullptr;
}

void destroy_stream(CUstream_st& stream) {
  stream.destroyed = true;
  auto& all = streams().all;
  all.erase(std::remove_if(all.begin(),
                           all.end(),
                           [](const auto& one) { return one->destroyed && one->queue.empty(); }),
            all.end());
}

void wait_for_others(const char* what, int& waited) {
  if (++waited > options().hang_seconds * 1000) {
    hang(what);
  }
  mutex().unlock();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  mutex().lock();
}

void run_until(CUstream_st& goal, const std::function<bool()>& done) {
  int waited = 0;
  while (!done()) {
    if (const auto stream = pick(goal)) {
      run_head(stream);
      waited = 0;
    } else {
      wait_for_others("a stream", waited);
    }
  }
}

void run_until_empty(CUstream_st& stream) {
  run_until(stream, [&stream] { return stream.queue.empty(); });
}

void drain(int device) {
  const auto all = streams().all;  // those destroyed leave it when they are done
  for (const auto& stream : all) {
    if (stream->device == device) {
      run_until_empty(*stream);
    }
  }
}

bool communicates(int device) {
  const auto& all = streams().all;
  return std::any_of(all.begin(), all.end(), [device](const auto& stream) {
    return stream->device == device &&
           std::any_of(stream->queue.begin(), stream->queue.end(), [](const Op& op) {
             return op.kind == Op::Kind::kMeet;
           });
  });
}

void run_some() {
  const auto all = streams().all;
  for (const auto& stream : all) {
    if (can_run(*stream) && streams().generator() % 2 == 0) {
      run_head(stream);
    }
  }
}

}  // namespace cuda_double
