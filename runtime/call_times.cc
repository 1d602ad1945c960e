// As in a run, each rank has just written what it gives, so it lies in its own core's cache. A call
// lasts from the last rank's arrival to the last one's return; the clock is the host's.
#include "runtime/call_times.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace trainrt {

namespace {

constexpr int kRepetitions = 20;
constexpr double kLateSeconds = 150e-6;
constexpr int64_t kSizes[] = {8, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void spin(double seconds) {
  for (const double until = now() + seconds; now() < until;) {
  }
}

// What a machine takes that is left alone: other programs only ever add time.
double lower_quartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 4];
}

class CallTimer {
 public:
  explicit CallTimer(Communicator& world)
      : world_(world),
        n_(static_cast<size_t>(world.world_size())),
        input_(kLargest / sizeof(float)),
        output_(kLargest / sizeof(float)) {}

  LinkType run() {
    LinkType link;
    link.measured_ranks = world_.world_size();
    for (const int64_t bytes : kSizes) {
      // In whole elements, and as many for each rank.
      const int64_t part = std::max<int64_t>(1, bytes / 4 / world_.world_size());
      const int64_t count = part * world_.world_size();
      const std::vector<int64_t> parts(n_, part);
      const std::vector<int64_t> pieces(n_, std::max<int64_t>(1, part / world_.world_size()));
      const auto add = [&](const char* name, const std::function<void()>& call) {
        link.calls[name].push_back({static_cast<double>(bytes), collective(bytes, call)});
      };
      add("all_reduce",
          [&] { world_.all_reduce(input_.data(), count, DType::kFloat32, ReductionKind::kSum); });
      add("reduce_scatter", [&] {
        world_.reduce_scatter(
            input_.data(), output_.data(), parts, DType::kFloat32, ReductionKind::kSum);
      });
      add("all_gather",
          [&] { world_.all_gather(input_.data(), output_.data(), parts, DType::kFloat32); });
      add("all_to_all", [&] {
        world_.all_to_all(input_.data(), pieces, output_.data(), pieces, DType::kFloat32);
      });
      add("broadcast", [&] { world_.broadcast(input_.data(), bytes, 0); });
      message(bytes, link);
    }
    const std::vector<CallSample>& reductions = link.calls["all_reduce"];
    const double n = world_.world_size();
    link.bandwidth = reductions.back().bytes * 2 * (n - 1) / n / reductions.back().seconds;
    return link;
  }

 private:
  static constexpr int64_t kLargest = 8 << 20;

  double collective(int64_t bytes, const std::function<void()>& call) {
    std::vector<double> seconds;
    for (int i = 0; i < kRepetitions; ++i) {
      std::memset(input_.data(), 0, static_cast<size_t>(bytes));
      world_.barrier();
      const double start = now();
      call();
      const std::vector<double> all = gather({start, now()});
      double last_start = 0, last_end = 0;
      for (size_t r = 0; r < n_; ++r) {
        last_start = std::max(last_start, all[2 * r]);
        last_end = std::max(last_end, all[2 * r + 1]);
      }
      seconds.push_back(last_end - last_start);
    }
    return lower_quartile(std::move(seconds));
  }

  // From rank 0 to rank 1: sending, receiving what is there, and how long one that waits for the
  // smallest message sleeps on after it was sent.
  void message(int64_t bytes, LinkType& link) {
    std::vector<double> sending, receiving, waking;
    for (int i = 0; i < kRepetitions; ++i) {
      const bool waits = i % 2 == 1;
      std::memset(input_.data(), 0, static_cast<size_t>(bytes));
      double sent = 0, took = 0, received = 0;
      world_.barrier();
      if (world_.rank() == 0) {
        spin(waits ? kLateSeconds : 0);
        const double start = now();
        world_.send(input_.data(), bytes, 1, 0);
        sent = now();
        took = sent - start;
      }
      if (!waits) {
        world_.barrier();
      }
      if (world_.rank() == 1) {
        const double start = now();
        world_.recv(output_.data(), bytes, 0, 0);
        received = now();
        took = received - start;
      }
      const std::vector<double> all = gather({took, world_.rank() == 0 ? sent : received});
      sending.push_back(all[0]);
      if (waits) {
        waking.push_back(all[3] - all[1]);
      } else {
        receiving.push_back(all[2]);
      }
    }
    const double receive = lower_quartile(std::move(receiving));
    link.calls["send"].push_back({static_cast<double>(bytes), lower_quartile(std::move(sending))});
    link.calls["receive"].push_back({static_cast<double>(bytes), receive});
    if (link.calls["send"].size() == 1) {
      link.wake_seconds = std::max(1e-9, lower_quartile(std::move(waking)) - receive);
    }
  }

  // Two numbers of every rank.
  std::vector<double> gather(const std::vector<double>& own) {
    std::vector<double> all(2 * n_);
    world_.all_gather(own.data(), all.data(), std::vector<int64_t>(n_, 2), DType::kFloat64);
    return all;
  }

  Communicator& world_;
  size_t n_;
  std::vector<float> input_, output_;
};

}  // namespace

LinkType time_calls(Communicator& world) {
  return CallTimer(world).run();
}

}  // namespace trainrt
